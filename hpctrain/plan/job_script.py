"""The text of a batch script, from the templates beside this file."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files

from hpctrain.errors import HpctrainError
from hpctrain.plan.job import Job, Scheduler

TEMPLATES = {
    "slurm": "slurm.sh",
}
SUBMIT: dict[Scheduler, tuple[str, ...]] = {
    "slurm": ("sbatch",),
    "pbs": ("qsub",),
    "lsf": ("bsub", "<"),
    "flux": ("flux", "batch"),
    "kubernetes": ("kubectl", "create", "-f"),
}
"""The command that submits a script, the script's path following it."""

DIRECTIVES = ("#SBATCH ", "#PBS ", "#BSUB ", "# flux: ")
WARNING_SECONDS = 120
"""Before the end of a job's time, a quarter of it at most: the scheduler sends USR1, for a checkpoint."""

NOT_RUN = (
    "Not run yet on such a machine: there was none where this was written. It was checked for syntax alone."
)
_FIELD = re.compile(r"@\{(\w+)\}")


def script(job: Job, program: str, file: str, command: str, placeholders: bool = True) -> str:
    """The batch script of a job.

    `program` starts hpctrain, from the folder of submission; `file` is the script's own path there;
    `command` is what wrote it. With `placeholders`, an account and a partition that are not given stand as
    words to be edited; else their lines are left out.
    """
    fields = _fields(job, program, file, command, placeholders)
    return _render(TEMPLATES[job.wish.scheduler], fields)


def _fields(job: Job, program: str, file: str, command: str, placeholders: bool) -> dict[str, str]:
    wish, deck = job.wish, job.deck
    least, most = job.wish.nodes
    edited = placeholders and (wish.account is None or wish.partition is None)
    edit = "Edit account and partition below, then submit it" if edited else "Submit it"
    settings = [part for override in job.overrides for part in ("--set", override)]
    fields = {
        "summary": _summary(job),
        "usage": f"{edit} from the folder that the deck's paths start from:",
        "submit": f"{' '.join(SUBMIT[wish.scheduler])} {shlex.quote(file)}",
        "not_run": "" if wish.scheduler == "slurm" and not job.gpus_per_node else NOT_RUN,
        "command": command,
        "account": wish.account or ("ACCOUNT" if placeholders else ""),
        "partition": wish.partition or ("PARTITION" if placeholders else ""),
        "name": job.name,
        "nodes": str(most) if least == most else f"{least}-{most}",
        "ranks_per_node": str(job.ranks_per_node),
        "ranks": str(most * job.ranks_per_node),
        "threads": str(deck.run.threads),
        "time": _clock(wish.seconds),
        "program": program,
        "deck": shlex.quote(str(job.path)),
        "settings": shlex.join(settings),
        "layout_note": _layout_note(job),
        "fitting": " ".join(map(str, job.fitting)),
        "environment": _read("environment-gpu.sh") if job.gpus_per_node else "",
    }
    if wish.scheduler == "slurm":
        fields |= _slurm_fields(job)
    return fields


def _slurm_fields(job: Job) -> dict[str, str]:
    mpirun = job.launcher == "mpirun"
    tasks = len(job.wish.variants)
    warning = min(WARNING_SECONDS, job.wish.seconds // 4)
    fields = {
        "gpus": f"#SBATCH --gpus-per-node={job.gpus_per_node}" if job.gpus_per_node else "",
        "gpu_bind": " --gpu-bind=none" if job.gpus_per_node else "",
        "memory": f"#SBATCH --mem={-(-job.memory // 2**20)}M" if job.memory else "",
        "array": f"#SBATCH --array=0-{tasks - 1}" if tasks else "",
        "output": "%x-%A-%a.out" if tasks else "%x-%j.out",
        # B: to this script alone, which is where mpirun is; else to the ranks that srun has started.
        "signal": f"#SBATCH --signal={'B:' if mpirun else ''}USR1@{warning}",
        "mpirun": 'read -ra mpirun <<<"${MPIRUN:-mpirun}"' if mpirun else "",
        "exported": " -x NCCL_DEBUG -x NCCL_IGNORE_CPU_AFFINITY -x CUDA_DEVICE_MAX_CONNECTIONS"
        if job.gpus_per_node
        else "",
        "threads": str(job.deck.run.threads),
        "sweep": "",
    }
    if tasks:
        changes = "\n".join(f"    {shlex.quote(' '.join(variant))}" for variant in job.wish.variants)
        own = {"variants": changes, "title": _word(job.deck.run.title), "run_dir": _word(job.deck.run.dir)}
        fields["sweep"] = _render("sweep.sh", own)
    return fields | {"launch": _render(f"launch-{job.launcher}.sh", fields)}


def _word(text: str) -> str:
    """Text as the inside of double quotes; HpctrainError where a shell would change it."""
    if re.search(r'["$`\\]', text):
        raise HpctrainError(f"{text!r} in the deck's run.title or run.dir: leave out \", $, ` and \\")
    return text


def _summary(job: Job) -> str:
    least, most = job.wish.nodes
    nodes = f"{most} node{'s' * (most > 1)}" if least == most else f"{least} to {most} nodes"
    has = f"{job.ranks_per_node} rank{'s' * (job.ranks_per_node > 1)}"
    has += f" and {job.gpus_per_node} GPUs" if job.gpus_per_node else ""
    tasks = f", in {len(job.wish.variants)} variants" if job.wish.variants else ""
    each = " each" if most > 1 else ""
    return f"Trains {job.path} on {nodes} with {has}{each}{tasks}; goes on where an earlier job stopped."


def _layout_note(job: Job) -> str:
    layout = job.deck.layout
    nodes = job.fitting[-1]
    return (
        f"# On {nodes} node{'s' * (nodes > 1)}: pipeline {layout.pipeline} x data {job.data} x context "
        f"{layout.context} x tensor {layout.tensor}. Numbers of nodes that the deck's layout fits:"
    )


def _clock(seconds: int) -> str:
    """Hours, minutes and seconds."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def _read(name: str) -> str:
    return (files("hpctrain.plan") / "templates" / name).read_text(encoding="utf-8").rstrip("\n")


def _render(name: str, fields: dict[str, str]) -> str:
    """A template with its fields; a line, or a comment, that has nothing but an empty field goes."""
    lines = []
    for line in _read(name).split("\n"):
        whole = _FIELD.sub(lambda match: fields[match[1]], line)
        if _FIELD.search(line) and (whole.strip() in {"", "#"} or _lacks(line, fields)):
            continue
        lines.append(whole)
    return "\n".join(lines) + ("\n" if name in TEMPLATES.values() else "")


def _lacks(line: str, fields: dict[str, str]) -> bool:
    """Whether a scheduler's line asks for something that is not given."""
    return line.startswith(DIRECTIVES) and any(not fields[name] for name in _FIELD.findall(line))
