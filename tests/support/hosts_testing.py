"""Two hosts on one machine, for tests: network namespaces joined by a veth pair, each with a host name
and process numbers of its own. Needs root and iproute2."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time

from lockstep_testing import wait_until


def attempt(*words):
    """Runs a command; returns its exit code and its last line."""
    result = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    return result.returncode, (result.stderr or result.stdout).strip().split("\n")[-1]


def why_no_hosts():
    """Why two hosts cannot be made here, or None."""
    for tool in ("ip", "unshare", "hostname"):
        if not shutil.which(tool):
            return f"no `{tool}` (iproute2, util-linux)"
    name = f"lockstep{os.getpid()}try"
    code, error = attempt("ip", "netns", "add", name)
    if code:
        return f"`ip netns add` is not permitted here: {error}"
    code, error = attempt("ip", "link", "add", f"lst{os.getpid()}", "netns", name, "type", "veth", "peer", "name", "peer", "netns", name)
    attempt("ip", "netns", "del", name)
    if code:
        return f"`ip link add type veth` is not permitted here: {error}"
    code, error = attempt("unshare", "--pid", "--uts", "--fork", "--mount-proc", "true")
    return f"`unshare --pid --uts` is not permitted here: {error}" if code else None


def shown_link(name):
    return subprocess.run(["ip", "-n", name, "-o", "link", "show", "veth"], stdout=subprocess.PIPE, text=True, check=True).stdout


def only_child(pid):
    """The process that `unshare` or `nsenter`, which fork, have started."""
    return int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


class Host:
    """One of them. What is started in it lives in one process namespace, whose first process holds it open."""

    def __init__(self, name, address):
        self.name, self.address = name, address
        self.first = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", f"hostname {name}; echo up; trap : CHLD; while :; do sleep 1000 & wait; done"],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, start_new_session=True)
        assert self.first.stdout.readline() == "up\n"
        # The shell is the child of `unshare`, which `ip` has become.
        self.init = only_child(self.first.pid)

    def command(self, *words):
        """The command line that runs these words on the host."""
        return ["nsenter", "--target", str(self.init), "--net", "--uts", "--pid", "--mount", *map(str, words)]

    def kill(self):
        """Ends all of it at once, as a loss of power does; its addresses go with it."""
        attempt("ip", "netns", "exec", self.name, "ip", "link", "set", "veth", "down")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)

    def kill_processes(self):
        """Ends its processes at once; the network goes on and tells of it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)

    def close(self):
        self.kill_processes()
        self.first.wait(20)
        self.first.stdout.close()
        for _ in range(100):
            if attempt("ip", "netns", "del", self.name)[0] == 0:
                return
            time.sleep(0.05)


@contextlib.contextmanager
def two_hosts(netem=None):
    """`netem`: words for tc, such as ("delay", "2ms", "loss", "1%"). Yields two Hosts, or a reason why not."""
    names = [f"lockstep{os.getpid()}{letter}" for letter in "ab"]
    addresses = ["10.231.77.1", "10.231.77.2"]
    made, hosts = [], []
    try:
        for name in names:
            code, error = attempt("ip", "netns", "add", name)
            assert code == 0, error
            made.append(name)
        code, error = attempt("ip", "link", "add", "veth", "netns", names[0], "type", "veth", "peer", "name", "veth", "netns", names[1])
        assert code == 0, error
        for name, address in zip(names, addresses):
            for words in (("addr", "add", f"{address}/24", "dev", "veth"), ("link", "set", "veth", "up"), ("link", "set", "lo", "up")):
                code, error = attempt("ip", "-n", name, *words)
                assert code == 0, error
            if netem:
                if not shutil.which("tc"):
                    yield "no `tc` (iproute2)"
                    return
                code, error = attempt("tc", "-n", name, "qdisc", "add", "dev", "veth", "root", "netem", *netem)
                if code:
                    yield f"`tc qdisc add netem` fails here: {error}"
                    return
        for name in names:
            # libuv, by which LibTorch's RPC finds its address, knows an interface only when it runs.
            wait_until(lambda name=name: "state UP" in shown_link(name), 20, f"veth of {name} up")
        for name, address in zip(names, addresses):
            hosts.append(Host(name, address))
        yield hosts
    finally:
        for host in hosts:
            host.close()
        for name in made[len(hosts):]:
            attempt("ip", "netns", "del", name)
        wait_until(lambda: not any(n in _run_output("ip", "netns", "list") for n in made), 20, "the end of the namespaces")


def _done(*words):
    code, error = attempt(*words)
    assert code == 0, f"{words}: {error}"


@contextlib.contextmanager
def bridged_hosts(count):
    """As two_hosts, of any number: each has a cable to a bridge in a network namespace of its own."""
    bridge = f"lockstep{os.getpid()}br"
    with contextlib.ExitStack() as stack:
        _done("ip", "netns", "add", bridge)
        stack.callback(attempt, "ip", "netns", "del", bridge)
        _done("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _done("ip", "-n", bridge, "link", "set", "bridge", "up")
        hosts = []
        for i in range(count):
            name, port = f"lockstep{os.getpid()}{'abcdefgh'[i]}", f"port{i}"
            _done("ip", "netns", "add", name)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(attempt, "ip", "netns", "del", name)
            _done("ip", "link", "add", "veth", "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
            _done("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
            _done("ip", "-n", name, "addr", "add", f"10.231.78.{i + 1}/24", "dev", "veth")
            for link in ("lo", "veth"):
                _done("ip", "-n", name, "link", "set", link, "up")
            wait_until(lambda name=name: "state UP" in shown_link(name), 20, f"veth of {name} up")
            hosts.append(Host(name, f"10.231.78.{i + 1}"))
            undo.pop_all()
            stack.callback(hosts[-1].close)
        yield hosts


def _run_output(*words):
    return subprocess.run(words, capture_output=True, text=True).stdout
