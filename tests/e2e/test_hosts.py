"""`lockstep run` and `lockstep train` on two hosts with two ranks each: network namespaces joined by a veth
pair, with delay and loss where the kernel has netem."""

import json
import pathlib
import re
import subprocess
import time
import unittest

import hosts_testing as hosts
import lockstep_testing as t

WHY_NOT = hosts.why_no_hosts()
PORT = 29511  # Of a network of its own, in which nobody else listens.


def end_of(processes, timeout):
    """(exit code, standard output, standard error) of each; kills what has not ended in time."""
    deadline, results = time.monotonic() + timeout, []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\nTIMED OUT"
        results.append((process.returncode, out, err))
    return results


def run_on(pair, *words, ranks=2, timeout=120, master=None, **env):
    """One launcher a host; its results, host by host. `master`: the name of the first host, else its address."""
    processes = []
    for number, host in enumerate(pair):
        run = [t.LOCKSTEP, "run", "--nnodes", 2, "--node-rank", number, "--nproc-per-node", ranks,
               "--master-addr", master or pair[0].address, "--master-port", PORT, *words]
        processes.append(subprocess.Popen(host.command(*run), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                          stdin=subprocess.DEVNULL, env=t.clean_environment(**env)))
    return end_of(processes, timeout)


class Calls(unittest.TestCase):
    RANK = t.BUILD_DIR / "tests/lockstep_rpc_hosts_rank"
    LANES = 16  # Connections for large tensors between two workers, in each direction.

    def printed(self, results):
        for code, _, err in results:
            self.assertEqual(code, 0, "".join(err for _, _, err in results))
        return "".join(out for _, out, _ in results)

    @unittest.skipIf(WHY_NOT, WHY_NOT)
    def test_small_calls_between_hosts_go_over_tcp_and_large_tensors_over_several_connections(self):
        for env in ({}, {"LOCKSTEP_RPC_SECRET": "sixteen letters!"}):
            with hosts.two_hosts() as pair:
                # Their names are in no /etc/hosts, where LibTorch's RPC by itself looks for its address.
                printed = self.printed(run_on(pair, self.RANK, **env))
            calls = re.findall(r"(w\d): (\d+) of (\d+) calls by (\w+)", printed)
            self.assertEqual(sorted(calls), [(f"w{rank}", "300", "300", "TCP") for rank in range(4)])
            lanes = [int(number) for number in re.findall(r"w\d: (\d+) connections", printed)]
            # With the two of the other host. Each sent 4 MB and sent 4 MB back.
            self.assertEqual(len(lanes), 4, printed)
            self.assertGreaterEqual(min(lanes), 2 * self.LANES, printed)

    @unittest.skipIf(WHY_NOT, WHY_NOT)
    def test_a_job_by_tcp_without_the_launchers_variables_and_one_that_joins_from_another_host(self):
        """The default route leads elsewhere: nobody may take its address for the one that others reach."""
        with hosts.two_hosts() as pair, t.temporary_folder() as folder:
            for host, number in zip(pair, "12"):
                for words in (("link", "add", "elsewhere", "type", "veth", "peer", "name", "nobody"),
                              ("addr", "add", f"192.0.2.{number}/32", "dev", "elsewhere"),
                              ("link", "set", "elsewhere", "up"), ("link", "set", "nobody", "up"),
                              ("route", "add", "default", "dev", "elsewhere")):
                    code, error = hosts.attempt("ip", "-n", host.name, *words)
                    self.assertEqual(code, 0, error)
            # LibTorch's store asks for the other end's name. Nobody answers there.
            env = t.clean_environment(ADDRESS_FILE=folder / "address", RES_OPTIONS="timeout:1 attempts:1")
            start = lambda host, *words: subprocess.Popen(host.command(self.RANK, *words), stdout=subprocess.PIPE, text=True,
                                                          stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env)
            ranks = [start(pair[rank // 2], f"tcp://{pair[0].address}:{PORT}?rank={rank}&world_size=4") for rank in range(4)]
            try:
                t.wait_until(lambda: (folder / "address").exists() or any(r.poll() for r in ranks), 60, "the group's address")
                address = (folder / "address").read_text() if (folder / "address").exists() else "none"
                last = start(pair[1], "--join", address)
            finally:
                results = end_of(ranks, 60)
            printed = self.printed(results + end_of([last], 60))
            self.assertEqual(address, f"{pair[0].address}:{PORT}/0")
            for rank in range(4):
                self.assertIn(f"connections at {pair[rank // 2].address}\n", printed)


class Training(unittest.TestCase):
    def train(self, pair, folder, backend, *flags, ranks=2):
        """The losses of the steps over that backend, and what was printed."""
        metrics = pathlib.Path(folder) / f"{backend}-{time.monotonic_ns()}.jsonl"
        results = run_on(pair, t.LOCKSTEP, "train", "--model", "mlp", "--dataset", "digits", "--backend", backend,
                         "--max-epochs", 1, "--limit-train-batches", 40, "--log-every-n-steps", 1, "--metrics-file", metrics,
                         *flags, ranks=ranks)
        for code, _, err in results:
            self.assertEqual(code, 0, "".join(err for _, _, err in results))
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [row["loss"] for row in rows if row["split"] == "train"], results[0][1]

    def compare(self, netem=None):
        with hosts.two_hosts(netem) as pair, t.temporary_folder() as folder:
            if isinstance(pair, str):
                self.skipTest(pair)
            losses, printed = self.train(pair, folder, "auto")
            self.assertRegex(printed, r"\b4 ranks over hierarchical on cpu")
            again, _ = self.train(pair, folder, "hierarchical")
            gloo, printed = self.train(pair, folder, "gloo")
            self.assertRegex(printed, r"\b4 ranks over gloo on cpu")
            self.assertEqual(len(losses), 40)
            self.assertEqual(losses, again, "the same bits in every run")
            # Gloo adds the four ranks' gradients in another order: a few units in the last place of float32
            # a step, which 40 steps carry on.
            for step, (ours, theirs) in enumerate(zip(losses, gloo)):
                self.assertAlmostEqual(ours, theirs, delta=2e-4 * max(1.0, abs(theirs)), msg=f"step {step}")

    @unittest.skipIf(WHY_NOT, WHY_NOT)
    def test_auto_takes_the_hierarchy_and_gives_gloos_losses(self):
        self.compare()

    @unittest.skipIf(WHY_NOT, WHY_NOT)
    def test_the_same_with_delay_and_loss(self):
        self.compare(("delay", "2ms", "1ms", "loss", "1%"))

    @unittest.skipIf(WHY_NOT, WHY_NOT)
    def test_of_one_rank_a_host_auto_takes_gloo(self):
        with hosts.two_hosts() as pair, t.temporary_folder() as folder:
            _, printed = self.train(pair, folder, "auto", "--limit-val-batches", 1, ranks=1)
            self.assertRegex(printed, r"\b2 ranks over gloo on cpu")

    @unittest.skipIf(WHY_NOT, WHY_NOT)
    def test_a_name_that_is_loopback_on_its_own_host(self):
        """As stock Debian's /etc/hosts has it: the first host's own name is 127.0.1.1 there."""
        with hosts.two_hosts() as pair, t.temporary_folder() as folder:
            for host, address in zip(pair, ("127.0.1.1", pair[0].address)):
                names = folder / host.name
                names.write_text(f"127.0.0.1 localhost\n{address} {pair[0].name}\n")
                subprocess.run(host.command("mount", "--bind", names, "/etc/hosts"), check=True)
            results = run_on(pair, t.LOCKSTEP, "train", "--model", "mlp", "--dataset", "digits", "--max-epochs", 1,
                             "--limit-train-batches", 3, "--limit-val-batches", 1, timeout=60, master=pair[0].name)
            for code, _, err in results:
                self.assertEqual(code, 0, err)
                # Neither host has a name server: c10d's log would tell of it.
                self.assertNotIn("cannot be retrieved", err)
            self.assertRegex(results[0][1], r"\b4 ranks over hierarchical on cpu")

    @unittest.skipIf(WHY_NOT, WHY_NOT)
    def test_host_0s_name_may_appear_after_the_launchers_have_started(self):
        """As a cluster's DNS has it."""
        with hosts.two_hosts() as pair, t.temporary_folder() as folder:
            names = folder / "hosts"
            names.write_text("127.0.0.1 localhost\n")
            processes = []
            for number, host in enumerate(pair):
                subprocess.run(host.command("mount", "--bind", names, "/etc/hosts"), check=True)
                with open(folder / f"err{number}", "wb") as err:
                    processes.append(subprocess.Popen(
                        host.command(t.LOCKSTEP, "run", "--nnodes", 2, "--node-rank", number, "--master-addr", "first.example",
                                     "--master-port", PORT, "sh", "-c", "echo rank $RANK"),
                        stdout=subprocess.PIPE, stderr=err, text=True, stdin=subprocess.DEVNULL, env=t.clean_environment()))
            t.wait_until(lambda: "'first.example'" in (folder / "err0").read_text(), 30, "host 0's word on its name")
            names.write_text(f"127.0.0.1 localhost\n{pair[0].address} first.example\n")
            results = end_of(processes, 60)
        self.assertEqual([code for code, _, _ in results], [0, 0], results)
        self.assertEqual(sorted(out.split()[-1] for _, out, _ in results), ["0", "1"])

    @unittest.skipIf(WHY_NOT, WHY_NOT)
    def test_a_name_server_that_does_not_answer_is_asked_for_two_seconds(self):
        with hosts.two_hosts() as pair, t.temporary_folder() as folder:
            (folder / "resolv.conf").write_text(f"nameserver {pair[1].address}\n")  # Nobody listens there.
            subprocess.run(pair[0].command("mount", "--bind", folder / "resolv.conf", "/etc/resolv.conf"), check=True)
            begin = time.monotonic()
            result = subprocess.run(pair[0].command(t.LOCKSTEP, "run", "--master-addr", "some-host.example", "true"),
                                    capture_output=True, text=True, env=t.clean_environment(), stdin=subprocess.DEVNULL)
            took = time.monotonic() - begin
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("cannot resolve the address 'some-host.example'", result.stderr)
        self.assertLess(took, 8)

    def test_hosts_declared_by_hand(self):
        """Needs no permission: two launchers on one machine that call themselves two hosts."""
        for attempt in range(5):  # A free port may be taken before the launcher binds it.
            port, processes = free_port(), []
            for number in range(2):
                env = t.clean_environment(LOCKSTEP_HOST_ID=f"host{number}")
                run = [t.LOCKSTEP, "run", "--nnodes", 2, "--node-rank", number, "--nproc-per-node", 2,
                       "--master-addr", "127.0.0.1", "--master-port", port, t.LOCKSTEP, "train", "--model", "mlp", "--dataset",
                       "digits", "--max-epochs", 1, "--limit-train-batches", 5, "--limit-val-batches", 1, "--strategy", "fsdp"]
                processes.append(subprocess.Popen([str(w) for w in run], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                                  text=True, stdin=subprocess.DEVNULL, env=env))
            results = end_of(processes, 120)
            if "in use" in results[0][2]:
                continue
            self.assertEqual([code for code, _, _ in results], [0, 0], results)
            self.assertRegex(results[0][1], r"\b4 ranks over hierarchical on cpu")
            self.assertIn("dp_replicate=2,dp_shard=2", results[0][1] + results[0][2], "a replica on each host")
            return
        self.fail("no free port in five attempts")


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Listing(unittest.TestCase):
    def test_env_lists_it(self):
        report = json.loads(t.run(t.LOCKSTEP, "env", "--json").stdout)
        self.assertIn("hierarchical", report["backends"])

    def test_on_one_host_it_is_shared_memory(self):
        result = t.run(t.LOCKSTEP, "train", "--backend", "hierarchical", "--devices", 2, "--max-epochs", 1,
                       "--limit-train-batches", 3, "--limit-val-batches", 1)
        self.assertRegex(result.stdout, r"(?m)^2 ranks over hierarchical on cpu")
        result = t.run(t.LOCKSTEP, "bench", "allreduce", "--backend", "hierarchical", "--devices", 2, "--sizes", 4096,
                       "--steps", 5, "--rounds", 1)
        self.assertRegex(result.stdout, "hierarchical")


if __name__ == "__main__":
    t.main()
