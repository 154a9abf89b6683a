"""Preemption, and the templates of deploy/. Slurm, mpirun and systemd's checks are real where they are installed. PBS's commands
are stand-ins, and nodes and pods are network namespaces. What is compared are the bits of a run that nobody disturbs.

A run has epochs without end until it is preempted, and then a few more: so no machine is too fast or too slow."""

import contextlib
import functools
import getpass
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import unittest

import hosts_testing
import lockstep_testing as t
import mpi_testing
from run_testing import MARK, Launched, marked_environment, processes_with
from test_elastic import Job, free_port

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
TEMPLATES = t.SOURCE_DIR / "deploy"
SNAPSHOTS = t.BUILD_DIR / "examples/002_ddp_series/multigpu_torchrun"
WHY_NO_HOSTS = hosts_testing.why_no_hosts()


def data(folder):
    """Of training for as many epochs as the folder says."""
    return ("--dataset", "digits", "--config", folder / "length.toml")


def flags(folder):
    """Of training in this folder, which goes on from its newest checkpoint."""
    return (*data(folder), "--checkpoint-dir", folder / "run", "--resume", "auto", "--save-weights", folder / "w.safetensors")


def set_epochs(folder, epochs):
    (folder / "length.toml").write_text(f"max-epochs = {epochs}\nlimit-train-batches = 20\nlimit-val-batches = 1\n")
    return epochs


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def undisturbed(ranks, epochs):
    """The weights of such training."""
    with t.temporary_folder() as folder:
        set_epochs(folder, epochs)
        t.run(t.LOCKSTEP, "train", *flags(folder), "--devices", ranks)
        return digest(folder / "w.safetensors")


def template(name, folder, **words):
    """A template's text, with the length and the folder of our training and these words in place of those there."""
    text = (TEMPLATES / name).read_text()
    words = {"--dataset digits": " ".join(map(str, data(folder))) + f" --save-weights {folder}/w.safetensors", **words}
    for old, new in words.items():
        assert old in text, f"{name} has no '{old}'"
        text = text.replace(old, str(new))
    return text


def path_with_lockstep(*first):
    return ":".join([*map(str, first), os.path.dirname(t.LOCKSTEP), os.environ["PATH"]])


class Deployed(unittest.TestCase):
    def setUp(self):
        self.new_folder()
        self.env, self.mark = marked_environment()
        self.addCleanup(self.nothing_left)

    def new_folder(self):
        self.folder = self.enterContext(t.temporary_folder())
        self.epochs = set_epochs(self.folder, 100_000)

    def nothing_left(self):
        """Ends what a failed test has left."""
        for pid, _ in processes_with(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        t.wait_until(lambda: not processes_with(self.mark), 20, "the end of all processes")

    def start(self, *command, **env):
        said = self.enterContext(open(self.folder / f"said.{len(list(self.folder.glob('said.*')))}", "wb+"))
        process = subprocess.Popen(list(map(str, command)), cwd=self.folder, env={**self.env, **{k: str(v) for k, v in env.items()}},
                                   stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        self.addCleanup(lambda: (process.kill(), process.wait()))
        return process

    def said(self):
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("said.*")))

    def until_saved(self, *processes):
        ended = lambda: any(process.poll() is not None for process in processes)
        t.wait_until(lambda: (self.folder / "run/latest").exists() or ended(), 60, "a checkpoint")
        self.assertFalse(ended(), self.said())

    def expect_ends(self, processes, *codes):
        for process in processes:
            code = process.wait(120)
            self.assertIn(128 - code if code < 0 else code, codes, self.said())

    def expect_preempted(self):
        self.assertNotIn("start again", self.said())
        self.assertFalse((self.folder / "w.safetensors").exists(), "it was over already")
        latest, = self.folder.glob("run*/latest/state.json")
        # Whole tens: so most tests are compared with the same run.
        self.epochs = set_epochs(self.folder, (json.loads(latest.read_text())["epoch"] // 10 + 1) * 10)

    def expect_the_bits(self, ranks=2):
        self.assertEqual(digest(self.folder / "w.safetensors"), undisturbed(ranks, self.epochs))
        self.assertIn("resumed after step", self.said())


class Preemption(Deployed):
    def check(self, number, ranks, *command):
        with self.subTest(number=number, command=command):
            self.new_folder()
            process = self.start(*command, *flags(self.folder))
            self.until_saved(process)
            process.send_signal(number)
            self.expect_ends([process], 128 + number)
            self.expect_preempted()
            self.expect_ends([self.start(*command, *flags(self.folder))], 0)
            self.expect_the_bits(ranks)

    def test_train_alone(self):
        self.check(signal.SIGUSR1, 1, t.LOCKSTEP, "train")

    def test_train_of_several_ranks(self):
        for number in (signal.SIGTERM, signal.SIGUSR1)[:1 + LONG]:
            self.check(number, 2, t.LOCKSTEP, "train", "--devices", 2, "--max-restarts", 3)

    def test_under_run(self):
        for number in (signal.SIGUSR1, signal.SIGTERM)[:1 + LONG]:  # systemd's unit gets TERM.
            self.check(number, 2, t.LOCKSTEP, "run", "--max-restarts", 3, "--nproc-per-node", 2, t.LOCKSTEP, "train")

    def test_a_program_without_handlers_goes_on_from_its_snapshot(self):
        with t.temporary_folder() as whole, t.temporary_folder() as ended:
            words = ("--max-restarts", 3, "--nproc-per-node", 2, SNAPSHOTS)
            with Launched(*words, 100_000, 1, cwd=ended) as job:
                t.wait_until((ended / "snapshot.safetensors").exists, 60, "the first snapshot")
                job.send(signal.SIGUSR1)
                code, _, err = job.end(60)
                job.nothing_left()
                self.assertEqual(code, 128 + signal.SIGUSR1, err)
                self.assertNotIn("start again", err)
            done = int(re.search(rb'"EPOCHS_RUN":"(\d+)"', (ended / "snapshot.safetensors").read_bytes())[1])
            with Launched(*words, done + 2, 1, cwd=whole) as job:
                self.assertEqual(job.end(120)[0], 0)
            with Launched(*words, done + 2, 1, cwd=ended) as job:
                code, out, err = job.end(120)
                self.assertEqual(code, 0, err)
                self.assertIn("Resuming training from snapshot", out)
            self.assertEqual(digest(ended / "snapshot.safetensors"), digest(whole / "snapshot.safetensors"))

    def test_one_of_two_hosts_is_told_and_all_ranks_save_the_same_step(self):
        for number in (signal.SIGUSR1, signal.SIGTERM)[:1 + LONG]:  # So does it on two hosts.
            with self.subTest(number=number):
                self.new_folder()
                for attempt in range(2):
                    run = (t.LOCKSTEP, "run", "--nnodes", 2, "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-endpoint",
                           f"127.0.0.1:{free_port()}", t.LOCKSTEP, "train", *flags(self.folder))
                    hosts = [self.start(*run) for _ in range(2)]
                    if attempt == 0:
                        self.until_saved(*hosts)
                        hosts[1].send_signal(number)
                    if attempt == 0:
                        self.expect_ends(hosts[1:], 128 + number)
                        # Its launcher may hear of the other host before its rank does.
                        self.expect_ends(hosts[:1], 128 + number, 128 + signal.SIGTERM)
                        self.expect_preempted()
                    else:
                        self.expect_ends(hosts, 0)
                self.expect_the_bits()

    def test_the_others_go_on_without_a_host_that_leaves(self):
        job = self.enterContext(Job("--nnodes", "1:2", folder=self.folder))
        job.add("a")
        job.generation(1)
        job.add("b")
        job.generation(2)
        left = job.hosts.pop("b")
        left.send(signal.SIGUSR1)
        self.assertEqual(left.end(60)[0], 128 + signal.SIGUSR1)
        self.assertEqual(job.generation(1), {0: (0, "a")})
        for name, (code, err) in job.end().items():
            self.assertEqual(code, 0, f"{name}: {err}")


SLURM = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
SLURM_CONF = """
ClusterName=lockstep
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
FirstJobId={first_job}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=n0 NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n1 NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES
"""


def free_port_of_a_job():
    """The template takes 20000 and the last four digits of the job's number."""
    while True:
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", 20000 + int.from_bytes(os.urandom(2), "big") % 10000))
            return one.getsockname()[1]


@unittest.skipUnless(all(map(shutil.which, SLURM)), "Slurm is not installed: slurmctld, slurmd, slurm-client, munge")
class Slurm(Deployed):
    """Two nodes of a cluster whose daemons are processes of this test."""

    def setUp(self):
        super().setUp()
        self.env["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self.env["PATH"] = path_with_lockstep()
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(
            name=socket.gethostname(), user=getpass.getuser(), folder=self.folder, first_job=free_port_of_a_job() - 20000 or 1,
            ports=[free_port() for _ in range(3)]))
        for name in ("state", "spool.n0", "spool.n1"):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").touch(0o600)
        (self.folder / "munge.key").write_bytes(os.urandom(64))
        # --force: nobody else may enter the folder, which it finds too strict.
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self.start("munged", "-F", "--force", "--num-threads=1", f"--socket={self.folder}/munge.socket", *files)
        t.wait_until((self.folder / "munge.socket").exists, 30, "munged")
        self.start("slurmctld", "-D", "-i")
        for node in ("n0", "n1"):
            self.start("slurmd", "-D", "-N", node)
        t.wait_until(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).stdout == "2\n", 60, "two nodes")

    def call(self, *words, check=True):
        return t.run(*words, env=self.env, cwd=self.folder, check=check)

    def about(self, job, name):
        return re.search(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", job, "-o").stdout)[1]

    def log(self):
        return "\n".join(file.read_text() for file in self.folder.glob("lockstep-*.log"))

    def until_training(self, job, times):
        """Until it trains for that many times, and has saved in each of them."""
        over = lambda: self.about(job, "JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        trains = lambda: self.log().count("2 ranks over") == times and len(list(self.folder.glob("run-*/step-*"))) >= times
        t.wait_until(lambda: trains() or over(), 90, "training")
        self.assertFalse(over(), self.log() + self.said())

    def test_a_warning_and_a_requeue_lead_to_the_bits(self):
        (self.folder / "job").write_text(template("slurm.sbatch", self.folder, **{
            "ranks_per_node=4": "ranks_per_node=1", "--cpus-per-task=4": "--cpus-per-task=1"}))
        job = self.call("sbatch", "--parsable", "job").stdout.strip()
        self.until_training(job, 1)
        self.call("scancel", "--signal=USR1", "--batch", job)  # What --signal=B:USR1@120 has Slurm do.
        self.until_training(job, 2)
        self.assertIn("stopped by SIGUSR1", self.log())
        self.call("scontrol", "requeuehold", job)  # As after a preemption: TERM. And wait for the number of epochs.
        t.wait_until(lambda: self.about(job, "JobState") == "PENDING", 120, "the requeued job")
        self.expect_preempted()
        self.call("scontrol", "release", job)
        t.wait_until(lambda: self.about(job, "JobState") in ("COMPLETED", "FAILED", "TIMEOUT"), 120, "the end of the job")
        self.assertEqual((self.about(job, "JobState"), self.about(job, "Restarts")), ("COMPLETED", "2"), self.log())
        self.assertNotIn("start again", self.log())
        self.assertEqual(self.log().count("resumed after step"), 2, self.log())
        self.assertEqual(digest(self.folder / "w.safetensors"), undisturbed(2, self.epochs))


PBS_TMRSH = """#!/bin/sh
# pbs_tmrsh HOST COMMAND...: as PBS's, starts it on that host with the variables of PBS alone, and ends with its exit code.
host=$1; shift
exec nsenter --target "$(cat {folder}/$host.init)" --net --uts --pid --mount \\
  env -i HOME={folder} PBS_JOBID="$PBS_JOBID" {mark}="${mark}" "$@"
"""


@unittest.skipIf(WHY_NO_HOSTS, WHY_NO_HOSTS)
class OnTwoHosts(Deployed):
    def setUp(self):
        super().setUp()
        self.hosts = self.enterContext(hosts_testing.two_hosts())
        self.name_hosts({host.name: host for host in self.hosts})

    def name_hosts(self, hosts, file="hosts"):
        """Each of them knows all by these names."""
        names = self.folder / file
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {name}\n" for name, host in hosts.items()))
        for host in hosts.values():
            t.run(*host.command("mount", "--bind", names, "/etc/hosts"))

    def send_to_lockstep(self, process, number):
        """`process` is nsenter, whose child it is."""
        os.kill(hosts_testing.only_child(process.pid), number)

    def test_pbs(self):
        bin_folder = self.folder / "bin"
        bin_folder.mkdir()
        (self.folder / ".bash_profile").write_text(f"export PATH={path_with_lockstep()} OMP_NUM_THREADS=1\n")
        for host in self.hosts:
            (self.folder / f"{host.name}.init").write_text(str(host.init))
        for name, text in (("pbs_tmrsh", PBS_TMRSH.format(folder=self.folder, mark=MARK)), ("qsub", "#!/bin/sh\necho $1 > submitted\n")):
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o700)
        (self.folder / "nodes").write_text("".join(f"{host.name}\n" for host in self.hosts))
        (self.folder / "job").write_text(template("job.pbs", self.folder, **{"ranks_per_node=4": "ranks_per_node=1"}))
        job = lambda number: self.start("nsenter", "--target", self.hosts[0].init, "--net", "--uts", "bash", "job",
                                        PATH=path_with_lockstep(bin_folder), PBS_O_WORKDIR=self.folder, PBS_JOBID=f"{number}.server",
                                        PBS_NODEFILE=self.folder / "nodes", PBS_ENVIRONMENT="PBS_BATCH")
        first = job(1)
        self.until_saved(first)
        clocks = [pid for pid, line in processes_with(self.mark) if line.startswith(b"timeout\0")]
        self.assertEqual(len(clocks), 2)
        os.kill(clocks[1], signal.SIGUSR1)  # It passes it on, as when its time is over.
        self.expect_ends([first], 138)
        self.expect_preempted()
        self.assertEqual((self.folder / "submitted").read_text(), "deploy/job.pbs\n")
        self.expect_ends([job(2)], 0)
        self.expect_the_bits()
        self.assertEqual(list(self.folder.glob("token-*")), [])

    def test_kubernetes(self):
        text = (TEMPLATES / "kubernetes.yaml").read_text()
        command = [word.strip().strip('"') for word in re.search(r"command: \[(.*?)\]", text, re.S)[1].split(",")]
        command = " ".join(command).replace("lockstep ", f"{t.LOCKSTEP} ").replace("/data", str(self.folder))
        command = command.replace("--dataset digits", shlex.join(map(str, data(self.folder))) + f" --save-weights {self.folder}/w.safetensors")
        command = command.replace("--nproc-per-node 4", "--nproc-per-node 1")
        self.name_hosts({f"lockstep-{index}.lockstep": host for index, host in enumerate(self.hosts)}, "pods")
        pods = lambda: [self.start(*host.command(*command.split()), LOCKSTEP_TOKEN="a token of sixteen letters") for host in self.hosts]
        first = pods()
        self.until_saved(*first)
        self.send_to_lockstep(first[1], signal.SIGTERM)  # As when its node is drained.
        self.expect_ends(first, 143)
        self.expect_preempted()
        self.expect_ends(pods(), 0)
        self.expect_the_bits()

    def test_all_connections_keep_to_the_interface_of_a_tunnel(self):
        """As docs/security.md says. The tunnel is a second cable."""
        a, b = (host.name for host in self.hosts)
        for words in (("-n", a, "link", "add", "tunnel", "type", "veth", "peer", "name", "tunnel", "netns", b),
                      ("-n", a, "addr", "add", "10.231.79.1/24", "dev", "tunnel"), ("-n", b, "addr", "add", "10.231.79.2/24", "dev", "tunnel"),
                      ("-n", a, "link", "set", "tunnel", "up"), ("-n", b, "link", "set", "tunnel", "up")):
            code, error = hosts_testing.attempt("ip", *words)
            self.assertEqual(code, 0, error)
        run = ("run", "--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.231.79.1:29500")
        hosts = [self.start(*host.command(t.LOCKSTEP, *run, "--local-addr", f"10.231.79.{number}", t.LOCKSTEP, "train",
                                          *flags(self.folder)), GLOO_SOCKET_IFNAME="tunnel")
                 for number, host in enumerate(self.hosts, 1)]
        self.until_saved(*hosts)
        for host in self.hosts:
            lines = t.run(*host.command("ss", "-Htn", "state", "established")).stdout.splitlines()
            peers = {line.split()[3].rsplit(":", 1)[0].removeprefix("[::ffff:").rstrip("]") for line in lines}
            self.assertIn(f"10.231.79.{2 if host is self.hosts[0] else 1}", peers)
            outside = [peer for peer in peers if not peer.startswith(("10.231.79.", "127.", "::1"))]
            self.assertEqual(outside, [], lines)
        for process in hosts:
            self.send_to_lockstep(process, signal.SIGTERM)
        self.expect_ends(hosts, 143)

    def test_a_name_that_appears_late_is_waited_for(self):
        """As that of a pod does."""
        names = self.folder / "pods"
        self.name_hosts({"first": self.hosts[0], "second": self.hosts[1]}, "pods")
        known = names.read_text()
        names.write_text("127.0.0.1 localhost\n")
        words = ("run", "--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500", "true")
        started = [self.start(*host.command(t.LOCKSTEP, *words)) for host in self.hosts]
        read = lambda: names.stat().st_atime_ns > names.stat().st_mtime_ns
        t.wait_until(read, 30, "a look into /etc/hosts")
        names.write_text(known)
        self.expect_ends(started, 0)


class Kubernetes(unittest.TestCase):
    def test_the_manifests_are_valid(self):
        tool = shutil.which("kubernetes-validate", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
        if not tool:
            self.skipTest("no kubernetes-validate: pip install kubernetes-validate")
        t.run(tool, "--strict", TEMPLATES / "kubernetes.yaml")


AGENT = """#!/bin/sh
# AGENT HOST COMMAND...: in place of ssh; runs the command here, where the host has that name.
host=$1; shift
exec unshare --uts sh -c "hostname $host && exec sh -c \\"\\$0\\"" "$*"
"""


@unittest.skipIf(mpi_testing.missing(), mpi_testing.missing())
class Mpirun(Deployed):
    def test_usr1_to_mpirun(self):
        if t.run("unshare", "--uts", "true", check=False).returncode != 0:
            self.skipTest("no right to give a process another host name (unshare --uts)")
        (self.folder / "agent").write_text(AGENT)
        (self.folder / "agent").chmod(0o700)
        for attempt in range(2):
            text = template("mpirun.sh", self.folder, **{"ranks_per_host=4": "ranks_per_host=1",
                                                         "${hosts%%,*}:29500": f"127.0.0.1:{free_port()}"})
            (self.folder / "job").write_text(text)
            job = self.start("sh", "job", "nodea,nodeb", PATH=path_with_lockstep(), TMPDIR=self.folder,
                             OMPI_MCA_orte_tmpdir_base=self.folder, OMPI_MCA_plm_rsh_agent=self.folder / "agent",
                             OMPI_ALLOW_RUN_AS_ROOT=1, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, OMPI_MCA_rmaps_base_oversubscribe=1)
            if attempt == 0:
                self.until_saved(job)
                job.send_signal(signal.SIGUSR1)
                self.expect_ends([job], 138)
                self.expect_preempted()
            else:
                self.expect_ends([job], 0)
        self.expect_the_bits()


class Systemd(Deployed):
    def unit(self, endpoint):
        token = self.folder / "token"
        token.touch(0o600)
        token.write_text("a token of sixteen letters")
        return template("lockstep.service", self.folder, **{
            "/usr/local/bin/lockstep": t.LOCKSTEP, "--nproc-per-node 4": "--nproc-per-node 1", "host0:29500": endpoint,
            "/srv/lockstep": self.folder})

    def test_the_unit_is_valid(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("no systemd-analyze")
        unit = self.folder / "lockstep.service"
        unit.write_text(self.unit("host0:29500"))
        result = t.run("systemd-analyze", "verify", "--man=no", unit, check=False)
        about = [line for line in (result.stdout + result.stderr).splitlines() if "lockstep.service" in line]
        self.assertEqual(about, [])

    def test_its_command_on_two_hosts(self):
        for attempt in range(2):
            text = self.unit(f"127.0.0.1:{free_port()}").replace("\\\n", " ")
            command = shlex.split(re.search(r"(?m)^ExecStart=(.*)$", text)[1])
            hosts = [self.start(*command) for _ in range(2)]
            if attempt == 0:
                self.until_saved(*hosts)
                hosts[0].send_signal(signal.SIGTERM)  # systemctl stop, to the main process alone.
            self.expect_ends(hosts, 0 if attempt else 143)
            if attempt == 0:
                self.expect_preempted()
        self.expect_the_bits()


if __name__ == "__main__":
    t.main()
