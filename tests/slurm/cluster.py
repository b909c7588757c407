"""A real SLURM cluster on one machine, for tests: slurmctld on a login node `ctl`, slurmd on `n1`, `n2`, …

Every host is a process 1 in network, host name, mount and process namespaces of its own; the hosts meet on a bridge that lives in the
login node's namespace and has no way out, so that nothing here reaches another machine. The file system is shared, as NFS would be.
Needs root, Debian's packages (`make slurm` installs them) and the right to make namespaces; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "setpriv", "unshare", "nsenter", "ip")
NAMESPACES = ("--net", "--uts", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
START_SECONDS = 60.0
COMMAND_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2]

INIT = """
dir=$0 host=$1
hostname "$host"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$dir/hosts" /etc/hosts
mount --bind "$dir/resolv.conf" "$(readlink -f /etc/resolv.conf)"
mount --bind "$dir/slurm" /etc/slurm
cd /
ip link set lo up
touch "$dir/run/$host.up"
trap 'exit 0' TERM
while :; do sleep 3600 & wait $!; done
"""
"""What process 1 of a host does; as a shell it reaps orphans."""

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=ctl
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is how long a requeued job waits before it may start again: 120 s by default
AuthInfo=socket={dir}/munge/socket,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd-%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
PlugStackConfig=/dev/null
# nodes claim more processors and memory than the machine has
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={patience}
KillWait=5
MinJobAge=3600
MessageTimeout=10
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
AccountingStorageType=accounting_storage/none
GresTypes=gpu
NodeName=n[1-{nodes}] CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory} Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=10 PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=1-0 DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
"""


def why_not() -> str | None:
    """Why no cluster can be started here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a cluster of fake nodes needs root on Linux"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} (`make slurm` installs Debian's packages)"
    probe = subprocess.run(["unshare", *NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return f"no namespaces can be made here: {probe.stderr.strip()}" if probe.returncode else None


class Cluster:
    """A running cluster of `nodes` nodes in `folder`; nothing of it is left when the block ends, or when this process dies.

    After `patience` seconds SLURM takes a silent node for dead. Each node has eight GPUs that are none (numbers in CUDA_VISIBLE_DEVICES for
    jobs that ask), which is enough to see what SLURM grants.
    """

    def __init__(self, folder: Path, *, nodes: int, cpus: int = 8, memory: int = 6000, gpus: int = 8, patience: int = 15) -> None:
        self.folder = folder.resolve()
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self._values = {"nodes": nodes, "cpus": cpus, "memory": memory, "gpus": gpus, "patience": patience}
        self._inits: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            self._write_files()
            self._start_host("ctl")
            self._on_ctl_net("ip", "link", "add", "br0", "type", "bridge")
            self._on_ctl_net("ip", "addr", "add", "10.77.0.1/24", "dev", "br0")
            self._on_ctl_net("ip", "link", "set", "br0", "up")
            munge = self.folder / "munge"
            paths = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
            self.run("munged", "--force", *paths, f"--socket={munge / 'socket'}")
            self.run("slurmctld")
            for node in self.nodes:
                self.boot(node)
            self._wait_until_idle()
            undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def run(self, *command: str, host: str = "ctl", cwd: Path | None = None, check: bool = True, **environment: str) -> str:
        """What a command says on a host, standard output alone."""
        inside = ["nsenter", "-t", str(self._inits[host][1]), "-n", "-u", "-m", "-p", f"--wdns={cwd or '/'}", "--", *command]
        result = subprocess.run(
            inside, env={**os.environ, **environment}, capture_output=True, text=True, timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL
        )
        assert not check or result.returncode == 0, f"{command} on {host}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout

    def boot(self, node: str) -> None:
        """Start a node, the first time or after it was powered off."""
        index = self.nodes.index(node)
        self._start_host(node)
        self._on_ctl_net("ip", "link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", str(self._inits[node][1]))
        self._on_ctl_net("ip", "link", "set", f"v{node}", "master", "br0", "up")
        self.run("ip", "addr", "add", f"10.77.0.{11 + index}/24", "dev", "eth0", host=node)
        self.run("ip", "link", "set", "eth0", "up", host=node)
        self.run("slurmd", host=node)

    def power_off(self, host: str) -> None:
        """Kill every process of a host at once; its network goes with it."""
        if host in self._inits:
            unshare, init = self._inits.pop(host)
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
            unshare.wait(30)

    def stop(self) -> None:
        """End the daemons and every host."""
        if "ctl" in self._inits:
            for command in (["scancel", "-f", "-u", "root"], ["scontrol", "shutdown"]):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.run("timeout", "10", *command, check=False)
        for host in list(self._inits):
            self.power_off(host)

    def submit(self, script: str, *arguments: str, cwd: Path, **environment: str) -> str:
        """The id of a job whose batch script is `script`, submitted from the folder `cwd` on the login node."""
        cwd.mkdir(parents=True, exist_ok=True)
        file = cwd / "job.sbatch"
        file.write_text(script)
        return self.run("sbatch", "--parsable", *arguments, file.name, cwd=cwd, **environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, what: str, is_so: Callable[[], bool], *, seconds: float) -> None:
        """Return when it is so."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"after {seconds:.0f} s still not: {what}\n{self.run('squeue', check=False)}"
            time.sleep(0.25)

    def wait_for_end(self, job: str, *, seconds: float) -> dict[str, str]:
        """What SLURM knows of a job that has come to its end, not only to be requeued."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL"}
        self.wait_for(f"the end of job {job}", lambda: self.job(job)["JobState"] in over, seconds=seconds)
        return self.job(job)

    def processes(self, host: str, words: str) -> list[int]:
        """The ids, as the host has them, of its processes whose command line holds `words`."""
        lines = self.run("ps", "-eo", "pid=,args=", host=host).splitlines()
        return [int(line.split()[0]) for line in lines if words in line and not line.split()[1].endswith(("ps", "srun"))]

    def _write_files(self) -> None:
        for name in ("slurm", "run", "log", "state", "spool", "munge"):
            (self.folder / name).mkdir(parents=True)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir()
        self.folder.chmod(0o755)
        names = ["127.0.0.1 localhost", "10.77.0.1 ctl", *(f"10.77.0.{11 + i} {node}" for i, node in enumerate(self.nodes))]
        (self.folder / "hosts").write_text("".join(f"{line}\n" for line in names))
        (self.folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for number in range(self._values["gpus"]):
            os.mknod(self.folder / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        files = f"{self.folder}/gpu[0-{self._values['gpus'] - 1}]"
        (self.folder / "slurm" / "slurm.conf").write_text(CONFIGURATION.format(dir=self.folder, **self._values))
        (self.folder / "slurm" / "gres.conf").write_text(f"NodeName=n[1-{len(self.nodes)}] Name=gpu File={files} AutoDetect=off\n")

    def _start_host(self, host: str) -> None:
        up = self.folder / "run" / f"{host}.up"
        up.unlink(missing_ok=True)
        with (self.folder / "log" / f"{host}.log").open("ab") as log:
            unshare = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "sh", "-euc", INIT, str(self.folder), host],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not up.exists():
            said = (self.folder / "log" / f"{host}.log").read_text()
            assert unshare.poll() is None, f"host {host} did not come up: {said}"
            assert time.monotonic() < deadline, f"host {host} is not up after {START_SECONDS} s: {said}"
            time.sleep(0.02)
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
        self._inits[host] = (unshare, int(children[0]))

    def _on_ctl_net(self, *command: str) -> None:
        """Run a command in the login node's network, with this machine's own file system and processes."""
        subprocess.run(
            ["nsenter", "-t", str(self._inits["ctl"][1]), "-n", *command], check=True, capture_output=True, timeout=COMMAND_SECONDS
        )

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split() != ["idle"] * len(self.nodes):
            assert time.monotonic() < deadline, (self.folder / "log" / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.1)
