"""The text of a batch script, from the templates beside this file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib.resources import files
from textwrap import indent

from hpctrain.deck.check import data_ranks
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.job.job_options import Scheduler
from hpctrain.job.ranks import Job
from hpctrain.text import control_problem, counted

SUBMIT: dict[Scheduler, tuple[str, ...]] = {
    "slurm": ("sbatch",),
    "pbs": ("qsub",),
    "lsf": ("bsub", "<"),
    "flux": ("flux", "batch"),
    "kubernetes": ("kubectl", "create", "-f"),
}
"""The command that submits a script, the script's path following it."""
DIRECTIVE: dict[Scheduler, str] = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "flux": "# flux:"}
"""What a line begins with in which a script asks the scheduler for something."""

WARNING_SECONDS = 120
"""Before the end of a job's time, a quarter of it at most: the scheduler sends USR1, for a checkpoint."""

START_SECONDS = 60
"""Of a job's time, for what comes before the run, where the run is told its time and not the job's end."""

NOT_RUN = "Never run on such a system: only the syntax of this script was checked."
NO_MODULES = "# Load the modules here that hpctrain was installed with, such as: module load gcc openmpi hdf5"
IMAGE, VOLUME = "hpctrain", ("hpctrain", "/work")
IN_CONTAINER = "/opt/hpctrain/.venv/bin/hpctrain"
GPU_VARIABLES = {"NCCL_DEBUG": "WARN", "NCCL_IGNORE_CPU_AFFINITY": "1"}

_YAML_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])
_POD_NAME = 40  # characters of a job's name at most: those of pods may have 63, and say more

# Lines that only ask for something, and go where it is not given.
_ASKING = re.compile(
    r"#SBATCH |#PBS -[Aq]|#BSUB |# flux: |\s*(labels|namespace|activeDeadlineSeconds|memory|nvidia.com/gpu):"
)
_FIELD = re.compile(r"@\{(\w+)\}")


def script(job: Job, program: str, file: str, command: str, placeholders: bool = True) -> str:
    """The batch script of a job.

    `program` starts hpctrain, from the folder of submission; `file` is the script's own path there;
    `command` is what wrote it. With `placeholders`, an account and a partition that are not given stand as
    words to be edited; else their lines are left out. HpctrainError where a text has control characters.
    """
    for name, text in (("the script's path", file), ("the path of hpctrain", program), ("this", command)):
        if problem := control_problem(text):
            raise HpctrainError(f"{name}, {text}: {problem}")
    scheduler = job.wish.scheduler
    fields = _common(job, file, command, placeholders) | {"program": shlex.quote(program)}
    special = {"slurm": _slurm, "pbs": _pbs, "lsf": _lsf, "flux": _flux, "kubernetes": _kubernetes}
    fields |= special[scheduler](job, path_word(file))
    if scheduler == "kubernetes":
        fields["launch"] = indent(_render("launch-kubernetes.sh", fields), " " * 18)
        return _render("kubernetes.yaml", fields) + "\n"
    if scheduler != "flux":
        fields["launch"] = _render(f"launch-{job.launcher}.sh", fields)
    if fields.get("kept"):
        fields["launch"] = _render("mirrored.sh", fields | {"launch": indent(fields["launch"], " " * 4)})
    if job.deck.stability.corruption != "off":
        fields["again"] = f"{_without_faulty(job, path_word(file))}\n{fields['again']}"
    fields |= {"head": _render("head.sh", fields), "end": _render("end.sh", fields)}
    return _render(f"{scheduler}.sh", fields) + "\n"


def _common(job: Job, file: str, command: str, placeholders: bool) -> dict[str, str]:
    """What the scripts of all schedulers have."""
    wish, deck = job.wish, job.deck
    least, most = wish.nodes
    edited = placeholders and (wish.account is None or wish.partition is None)
    edit = "Edit account and partition below, then submit it" if edited else "Submit it"
    seconds, mpi = job.seconds, job.wish.mpi or "pmix"
    modules = _render("modules.sh", {"modules": shlex.join(wish.modules)}) if wish.modules else NO_MODULES
    return {
        "summary": _summary(job),
        "usage": f"{edit} from the folder that the paths in the deck are relative to:",
        "submit": submission(wish.scheduler, file),
        "not_run": "" if wish.scheduler == "slurm" and not job.gpus_per_node else NOT_RUN,
        "few_cores": f"{job.few_cores[:1].upper()}{job.few_cores[1:]}." if job.few_cores else "",
        "command": command,
        "account": wish.account or ("ACCOUNT" if placeholders else ""),
        "partition": wish.partition or ("PARTITION" if placeholders else ""),
        "name": job.name,
        "nodes": str(most) if least == most else f"{least}-{most}",
        "ranks_per_node": str(job.ranks_per_node),
        "ranks": str(most * job.ranks_per_node),
        "threads": str(deck.run.threads),
        "cores_per_rank": str(job.cores_per_rank),
        "cores": str(job.ranks_per_node * job.cores_per_rank),
        "mpi": mpi,
        "fence": _read("fence.sh") if mpi.startswith("pmix") else "",
        "time": f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}",
        "seconds": str(seconds),
        "run_seconds": str(max(seconds - START_SECONDS, seconds // 2)),
        "warning": str(min(WARNING_SECONDS, seconds // 4)),
        "deck": path_word(str(job.path)),
        "modules": modules,
        "directives": "\n".join(f"{DIRECTIVE.get(wish.scheduler)} {text}" for text in wish.directives),
        "settings": _settings(job.overrides),
        "layout_note": _layout_note(job),
        "fitting": " ".join(map(str, job.fitting)),
        "environment": _read("environment-gpu.sh") if job.gpus_per_node else "",
        "exported": "".join(f" -x {name}" for name in GPU_VARIABLES) if job.gpus_per_node else "",
        "faults": f"{job.name}.faults",
        "sweep": "",
    }


def _slurm(job: Job, _file: str) -> dict[str, str]:
    mpirun = job.launcher == "mpirun"
    tasks = len(job.wish.variants)
    # B: to this script alone, which is where mpirun is; else to the ranks that srun has started.
    to = "B:" if mpirun else ""
    least, most = job.wish.nodes
    cores = {"cores": str(job.ranks_per_node * job.cores_per_rank)}
    fields = {
        "kept": "#SBATCH --no-kill" if job.deck.checkpoint.mirror and most > 1 else "",
        "tasks": f"#SBATCH --ntasks-per-node={job.ranks_per_node}"
        if least == most
        else _render("cores.sh", cores),
        "gpus": f"#SBATCH --gpus-per-node={job.gpus_per_node}" if job.gpus_per_node else "",
        "gpu_bind": " --gpu-bind=none" if job.gpus_per_node else "",
        "memory": f"#SBATCH --mem={_megabytes(job)}M" if job.memory else "",
        "array": f"#SBATCH --array=0-{tasks - 1}" if tasks else "",
        "output": "%x-%A-%a.out" if tasks else "%x-%j.out",
        "signal": f"#SBATCH --signal={to}USR1@{min(WARNING_SECONDS, job.seconds // 4)}",
        "mpirun": 'read -ra mpirun <<<"${MPIRUN:-mpirun}"' if mpirun else "",
        "faults": f'"{job.name}-$SLURM_JOB_ID.faults"',
        "again": 'echo "exit code $code: queued again"\nscontrol requeue "$SLURM_JOB_ID"',
    }
    if tasks and job.wish.folders:
        fields["sweep"] = _render("array.sh", {"cases": "\n".join(_cases(job))})
    elif tasks:
        changes = "\n".join(f"    {shlex.quote(' '.join(variant))}" for variant in job.wish.variants)
        own = {
            "variants": changes,
            "title": _of_task("run.title", job.deck.run.title),
            "run_dir": _of_task("run.dir", job.deck.run.dir),
        }
        fields["sweep"] = _render("sweep.sh", own)
    return fields


def _cases(job: Job) -> Iterator[str]:
    """Of each task of an array the line that gives it its settings."""
    for number, (variant, folder) in enumerate(zip(job.wish.variants, job.wish.folders, strict=True)):
        yield f"{number}) run_dir={shlex.quote(folder)}; settings+=({_settings(variant)}) ;;"


def _without_faulty(job: Job, file: str) -> str:
    """Lines by which a job goes on without nodes that had silent faults, or that say what cannot be done."""
    fields = {"faulty_dir": path_word(job.deck.run.dir), "array_task": "", "file": file}
    if job.wish.variants:
        own = '"$run_dir"'
        numbered = _of_task("run.dir", job.deck.run.dir).replace("run.dir=", "", 1)
        fields["faulty_dir"] = own if job.wish.folders else numbered
        fields["array_task"] = ' --array="$SLURM_ARRAY_TASK_ID"'
    return _render("faulty-slurm.sh" if job.wish.scheduler == "slurm" else "faulty.sh", fields)


def _pbs(job: Job, file: str) -> dict[str, str]:
    return {
        "gpus": f":ngpus={job.gpus_per_node}" if job.gpus_per_node else "",
        "memory": f":mem={_megabytes(job)}mb" if job.memory else "",
        "again": _resubmit(f"qsub {file}"),
    }


def _lsf(job: Job, file: str) -> dict[str, str]:
    least, most = job.wish.nodes
    ranks = job.ranks_per_node
    minutes = job.seconds // 60
    return {
        "tasks": str(most * ranks) if least == most else f"{least * ranks},{most * ranks}",
        "gpus": f'#BSUB -gpu "num={job.gpus_per_node}/host:mode=shared"' if job.gpus_per_node else "",
        "memory": f'#BSUB -R "rusage[mem={_megabytes(job)}MB/host]"' if job.memory else "",
        "hours_minutes": f"{minutes // 60:02d}:{minutes % 60:02d}",
        "warning_minutes": str(max(1, min(WARNING_SECONDS // 60, minutes // 4))),
        # Exit code 75 is queued again by LSF (-Q).
        "again": f'if [ "$code" -ne 75 ]; then {_resubmit(f"bsub <{file}", "; ")}; fi',
    }


def _flux(job: Job, file: str) -> dict[str, str]:
    gpus = -(-job.gpus_per_node // job.ranks_per_node)
    return {
        "gpus": f"# flux: --gpus-per-slot={gpus}" if gpus else "",
        "gpus_per_task": f" --gpus-per-task={gpus} -o gpu-affinity=off" if gpus else "",
        "flux_seconds": str(job.seconds - min(START_SECONDS, job.seconds // 4) // 2),
        # The enclosing instance is where jobs wait.
        "again": _resubmit(f"flux --parent batch {file}"),
    }


def _kubernetes(job: Job, _file: str) -> dict[str, str]:
    settings = list(job.overrides)
    if job.wish.seconds is not None:
        settings.append(f"run.time_limit={max(job.seconds - START_SECONDS, job.seconds // 2)}")
    wish = job.wish
    claim, mount = wish.volume or VOLUME
    named = {"account": wish.account, "partition": wish.partition}
    return {
        **{name: _yaml_text(text) for name, text in named.items() if text},
        "image": _yaml_text(wish.image or IMAGE),
        "claim": _yaml_text(claim),
        "mount": _yaml_text(mount),
        "shared_memory": f"{-(-job.shared_memory // 2**20)}Mi",
        "deck": path_word(str(job.path)).replace("$", "$$"),
        "gpus": str(job.gpus_per_node or ""),
        "memory": f"{_megabytes(job)}Mi" if job.memory else "",
        "deadline": str(job.wish.seconds or ""),
        "name": _yaml_text(re.sub(r"[_.]", "-", job.name.lower())[:_POD_NAME].strip("-") or "hpctrain"),
        "program": IN_CONTAINER,
        # Kubernetes itself replaces $(NAME) in arguments, and $$ by $.
        "settings": _settings(settings).replace("$", "$$"),
        "exported": "".join(f" -x {name}={value}" for name, value in GPU_VARIABLES.items())
        if job.gpus_per_node
        else "",
    }


def submission(scheduler: Scheduler, file: str) -> str:
    """The command line that submits a script."""
    return f"{' '.join(SUBMIT[scheduler])} {path_word(file)}"


def path_word(path: str) -> str:
    """A path as one word for a shell, and no option of the command that it is given to."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _yaml_text(text: str) -> str:
    """A text that YAML takes for a text; it stands as it is where that is clear."""
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9._/-]*", text)
    return text if plain and text.lower() not in _YAML_WORDS else json.dumps(text, ensure_ascii=False)


def _of_task(key: str, text: str) -> str:
    """A `--set` argument for the shell: the text, a hyphen and the number of the array's task."""
    task = '"$SLURM_ARRAY_TASK_ID"'
    if re.fullmatch(r"[\w./ -]+", text) and text.isascii():
        return f'"{key}={text}-$SLURM_ARRAY_TASK_ID"'
    if text.startswith(('"', "'")):  # bare, it could be TOML that ends before the number
        return shlex.quote(f"{key}={toml_value(text)[:-1]}-") + task + "'\"'"
    return shlex.quote(f"{key}={text}-") + task


def _resubmit(command: str, separator: str = "\n") -> str:
    return f'echo "exit code $code: submitted again"{separator}{command}'


def _settings(changes: Sequence[str]) -> str:
    return shlex.join(part for change in changes for part in ("--set", change))


def _megabytes(job: Job) -> int:
    """Memory of a node in steps of 2^20, rounded up."""
    assert job.memory is not None
    return -(-job.memory // 2**20)


def _summary(job: Job) -> str:
    least, most = job.wish.nodes
    nodes = counted(most, "node") if least == most else f"{least} to {most} nodes"
    has = counted(job.ranks_per_node, "rank")
    has += f" and {counted(job.gpus_per_node, 'GPU')}" if job.gpus_per_node else ""
    tasks = f", in {len(job.wish.variants)} variants" if job.wish.variants else ""
    each = " each" if most > 1 else ""
    return f"Trains {job.path} on {nodes} with {has}{each}{tasks}; resumes where an earlier job stopped."


def _layout_note(job: Job) -> str:
    layout = job.deck.layout
    data = data_ranks(job.deck, job.fitting[-1] * job.ranks_per_node)
    choice = job.wish.scheduler in {"slurm", "lsf"}
    return (
        f"# On {counted(job.fitting[-1], 'node')}: pipeline {layout.pipeline} x data {data} x context "
        f"{layout.context} x tensor {layout.tensor}."
        + (" Numbers of nodes that the deck's layout fits:" if choice else "")
    )


def _read(name: str) -> str:
    return (files("hpctrain.job") / "templates" / name).read_text(encoding="utf-8").rstrip("\n")


def _render(name: str, fields: dict[str, str]) -> str:
    """A template with its fields; lines that have nothing else and lack theirs go."""
    lines = []
    for line in _read(name).split("\n"):
        used = _FIELD.findall(line)
        filled = _FIELD.sub(lambda match: fields[match[1]], line)
        asking = _ASKING.match(line) and any(not fields[each] for each in used)
        if not used or not (asking or filled.strip() in {"", "#"}):
            lines.append(filled)
    return "\n".join(lines)
