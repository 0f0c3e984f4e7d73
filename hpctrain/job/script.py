"""Text of a batch script, which is made from the templates in the folder `templates`."""

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
from hpctrain.job.batch_job import Job
from hpctrain.job.job_options import Scheduler
from hpctrain.text import control_problem, counted

SUBMIT: dict[Scheduler, tuple[str, ...]] = {
    "slurm": ("sbatch",),
    "pbs": ("qsub",),
    "lsf": ("bsub", "<"),
    "flux": ("flux", "batch"),
    "kubernetes": ("kubectl", "create", "-f"),
}
"""Command that submits a script; the script's path follows it."""

DIRECTIVE: dict[Scheduler, str] = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "flux": "# flux:"}
"""Beginning of the lines of a script by which it requests something of the scheduler."""

WARNING_SECONDS = 120
"""Seconds before the time limit at which the scheduler sends USR1, upon which the run writes a checkpoint.

They are at most a quarter of the time limit.
"""

START_SECONDS = 60
"""Seconds that a job may need before its run starts.

They matter for schedulers that do not tell a job its end: there, the script gives the run a time limit.
"""

NOT_RUN = "Never run on such a system: only the syntax of this script was checked."
NO_MODULES = "# Load the modules here that hpctrain was installed with, such as: module load gcc openmpi hdf5"
IMAGE, VOLUME = "hpctrain", ("hpctrain", "/work")
IN_CONTAINER = "/opt/hpctrain/.venv/bin/hpctrain"
GPU_VARIABLES = {"NCCL_DEBUG": "WARN", "NCCL_IGNORE_CPU_AFFINITY": "1"}

_YAML_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])
_MAX_NAME_LENGTH = 40
"""Most characters of a job's name in Kubernetes. Names of pods add to it, and may have 63."""

# Lines that request something of the scheduler. They are left out if a field is empty.
_REQUEST_LINE = re.compile(
    r"#SBATCH |#PBS -[Aq]|#BSUB |# flux: |\s*(labels|namespace|activeDeadlineSeconds|memory|nvidia.com/gpu):"
)
_FIELD = re.compile(r"@\{(\w+)\}")


def render_script(job: Job, program: str, file: str, command: str, placeholders: bool = True) -> str:
    """Return the batch script of a job.

    Args:
        job: The job.
        program: Path of the program `hpctrain`, relative to the folder from which the script is submitted.
        file: Path of the script, relative to the same folder.
        command: Command that writes the script, for a comment.
        placeholders: True to write ACCOUNT and PARTITION, which the user edits, if the job has no account or
            partition; False to leave out these lines.

    Raises:
        HpctrainError: A text has control characters.
    """
    for name, text in (("the script's path", file), ("the path of hpctrain", program), ("this", command)):
        if problem := control_problem(text):
            raise HpctrainError(f"{name}, {text}: {problem}")
    scheduler = job.options.scheduler
    fields = _common(job, file, command, placeholders) | {"program": shlex.quote(program)}
    field_functions = {"slurm": _slurm, "pbs": _pbs, "lsf": _lsf, "flux": _flux, "kubernetes": _kubernetes}
    fields |= field_functions[scheduler](job, quote_path(file))
    if scheduler == "kubernetes":
        fields["launch"] = indent(_render("launch-kubernetes.sh", fields), " " * 18)
        return _render("kubernetes.yaml", fields) + "\n"
    if scheduler != "flux":
        fields["launch"] = _render(f"launch-{job.launcher}.sh", fields)
    if fields.get("no_kill"):
        fields["launch"] = _render("mirrored.sh", fields | {"launch": indent(fields["launch"], " " * 4)})
    if job.deck.stability.corruption != "off":
        fields["resubmit"] = f"{_without_faulty(job, quote_path(file))}\n{fields['resubmit']}"
    fields |= {"head": _render("head.sh", fields), "end": _render("end.sh", fields)}
    return _render(f"{scheduler}.sh", fields) + "\n"


def _common(job: Job, file: str, command: str, placeholders: bool) -> dict[str, str]:
    """Return the fields that the templates of all schedulers have."""
    options, deck = job.options, job.deck
    least, most = options.nodes
    has_placeholders = placeholders and (options.account is None or options.partition is None)
    edit = "Edit account and partition below, then submit it" if has_placeholders else "Submit it"
    seconds, mpi = job.seconds, job.options.mpi or "pmix"
    modules = (
        _render("modules.sh", {"modules": shlex.join(options.modules)}) if options.modules else NO_MODULES
    )
    return {
        "summary": _summary(job),
        "usage": f"{edit} from the folder that the paths in the deck are relative to:",
        "submit": submit_command(options.scheduler, file),
        "not_run": "" if options.scheduler == "slurm" and not job.gpus_per_node else NOT_RUN,
        "few_cores": f"{job.core_warning[:1].upper()}{job.core_warning[1:]}." if job.core_warning else "",
        "command": command,
        "account": options.account or ("ACCOUNT" if placeholders else ""),
        "partition": options.partition or ("PARTITION" if placeholders else ""),
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
        "deck": quote_path(str(job.path)),
        "modules": modules,
        "directives": "\n".join(f"{DIRECTIVE.get(options.scheduler)} {text}" for text in options.directives),
        "settings": _settings(job.overrides),
        "layout_note": _layout_note(job),
        "fitting": " ".join(map(str, job.node_counts)),
        "environment": _read("environment-gpu.sh") if job.gpus_per_node else "",
        "exported": "".join(f" -x {name}" for name in GPU_VARIABLES) if job.gpus_per_node else "",
        "faults": f"{job.name}.faults",
        "sweep": "",
    }


def _slurm(job: Job, _file: str) -> dict[str, str]:
    mpirun = job.launcher == "mpirun"
    tasks = len(job.options.variants)
    # With "B:", Slurm signals only this script, which runs mpirun; otherwise the ranks that srun started.
    target = "B:" if mpirun else ""
    least, most = job.options.nodes
    cores = {"cores": str(job.ranks_per_node * job.cores_per_rank)}
    fields = {
        "no_kill": "#SBATCH --no-kill" if job.deck.checkpoint.mirror and most > 1 else "",
        "tasks": f"#SBATCH --ntasks-per-node={job.ranks_per_node}"
        if least == most
        else _render("cores.sh", cores),
        "gpus": f"#SBATCH --gpus-per-node={job.gpus_per_node}" if job.gpus_per_node else "",
        "gpu_bind": " --gpu-bind=none" if job.gpus_per_node else "",
        "memory": f"#SBATCH --mem={_megabytes(job)}M" if job.memory else "",
        "array": f"#SBATCH --array=0-{tasks - 1}" if tasks else "",
        "output": "%x-%A-%a.out" if tasks else "%x-%j.out",
        "signal": f"#SBATCH --signal={target}USR1@{min(WARNING_SECONDS, job.seconds // 4)}",
        "mpirun": 'read -ra mpirun <<<"${MPIRUN:-mpirun}"' if mpirun else "",
        "faults": f'"{job.name}-$SLURM_JOB_ID.faults"',
        "resubmit": 'echo "exit code $code: queued again"\nscontrol requeue "$SLURM_JOB_ID"',
    }
    if tasks and job.options.folders:
        fields["sweep"] = _render("array.sh", {"cases": "\n".join(_cases(job))})
    elif tasks:
        changes = "\n".join(f"    {shlex.quote(' '.join(variant))}" for variant in job.options.variants)
        fields_of_sweep = {
            "variants": changes,
            "title": _task_setting("run.title", job.deck.run.title),
            "run_dir": _task_setting("run.dir", job.deck.run.dir),
        }
        fields["sweep"] = _render("sweep.sh", fields_of_sweep)
    return fields


def _cases(job: Job) -> Iterator[str]:
    """Yield the line for each task of an array that sets its run folder and its settings."""
    for number, (variant, folder) in enumerate(zip(job.options.variants, job.options.folders, strict=True)):
        yield f"{number}) run_dir={shlex.quote(folder)}; settings+=({_settings(variant)}) ;;"


def _without_faulty(job: Job, file: str) -> str:
    """Return the lines that submit a job again without the nodes that had silent faults.

    For schedulers other than Slurm, the lines only print the names of these nodes.
    """
    fields = {"faulty_dir": quote_path(job.deck.run.dir), "array_task": "", "file": file}
    if job.options.variants:
        numbered = _task_setting("run.dir", job.deck.run.dir).replace("run.dir=", "", 1)
        fields["faulty_dir"] = '"$run_dir"' if job.options.folders else numbered
        fields["array_task"] = ' --array="$SLURM_ARRAY_TASK_ID"'
    return _render("faulty-slurm.sh" if job.options.scheduler == "slurm" else "faulty.sh", fields)


def _pbs(job: Job, file: str) -> dict[str, str]:
    return {
        "gpus": f":ngpus={job.gpus_per_node}" if job.gpus_per_node else "",
        "memory": f":mem={_megabytes(job)}mb" if job.memory else "",
        "resubmit": _resubmit(f"qsub {file}"),
    }


def _lsf(job: Job, file: str) -> dict[str, str]:
    least, most = job.options.nodes
    ranks = job.ranks_per_node
    minutes = job.seconds // 60
    return {
        "tasks": str(most * ranks) if least == most else f"{least * ranks},{most * ranks}",
        "gpus": f'#BSUB -gpu "num={job.gpus_per_node}/host:mode=shared"' if job.gpus_per_node else "",
        "memory": f'#BSUB -R "rusage[mem={_megabytes(job)}MB/host]"' if job.memory else "",
        "hours_minutes": f"{minutes // 60:02d}:{minutes % 60:02d}",
        "warning_minutes": str(max(1, min(WARNING_SECONDS // 60, minutes // 4))),
        # Exit code 75 is queued again by LSF (-Q).
        "resubmit": f'if [ "$code" -ne 75 ]; then {_resubmit(f"bsub <{file}", "; ")}; fi',
    }


def _flux(job: Job, file: str) -> dict[str, str]:
    gpus = -(-job.gpus_per_node // job.ranks_per_node)
    return {
        "gpus": f"# flux: --gpus-per-slot={gpus}" if gpus else "",
        "gpus_per_task": f" --gpus-per-task={gpus} -o gpu-affinity=off" if gpus else "",
        "flux_seconds": str(job.seconds - min(START_SECONDS, job.seconds // 4) // 2),
        # The enclosing instance is where jobs wait.
        "resubmit": _resubmit(f"flux --parent batch {file}"),
    }


def _kubernetes(job: Job, _file: str) -> dict[str, str]:
    settings = list(job.overrides)
    if job.options.seconds is not None:
        settings.append(f"run.time_limit={max(job.seconds - START_SECONDS, job.seconds // 2)}")
    options = job.options
    claim, mount = options.volume or VOLUME
    named = {"account": options.account, "partition": options.partition}
    return {
        **{name: _yaml_text(text) for name, text in named.items() if text},
        "image": _yaml_text(options.image or IMAGE),
        "claim": _yaml_text(claim),
        "mount": _yaml_text(mount),
        "shared_memory": f"{-(-job.shared_memory // 2**20)}Mi",
        "deck": quote_path(str(job.path)).replace("$", "$$"),
        "gpus": str(job.gpus_per_node or ""),
        "memory": f"{_megabytes(job)}Mi" if job.memory else "",
        "deadline": str(job.options.seconds or ""),
        "name": _yaml_text(
            re.sub(r"[_.]", "-", job.name.lower())[:_MAX_NAME_LENGTH].strip("-") or "hpctrain"
        ),
        "program": IN_CONTAINER,
        # Kubernetes itself replaces $(NAME) in arguments, and $$ by $.
        "settings": _settings(settings).replace("$", "$$"),
        "exported": "".join(f" -x {name}={value}" for name, value in GPU_VARIABLES.items())
        if job.gpus_per_node
        else "",
    }


def submit_command(scheduler: Scheduler, file: str) -> str:
    """Return the command line that submits a script."""
    return f"{' '.join(SUBMIT[scheduler])} {quote_path(file)}"


def quote_path(path: str) -> str:
    """Return a path as one quoted word for a shell. It cannot be mistaken for an option of a command."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _yaml_text(text: str) -> str:
    """Return a text as a string of YAML, in quotes if YAML could read it as another type."""
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9._/-]*", text)
    return text if plain and text.lower() not in _YAML_WORDS else json.dumps(text, ensure_ascii=False)


def _task_setting(key: str, text: str) -> str:
    """Return the `--set` argument that sets a key to a text, a hyphen and the number of the array's task.

    The argument is quoted for a shell, which inserts the number.
    """
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
    """Return the requested memory of a node in units of 2^20 bytes, rounded up."""
    assert job.memory is not None
    return -(-job.memory // 2**20)


def _summary(job: Job) -> str:
    least, most = job.options.nodes
    nodes = counted(most, "node") if least == most else f"{least} to {most} nodes"
    resources = counted(job.ranks_per_node, "rank")
    resources += f" and {counted(job.gpus_per_node, 'GPU')}" if job.gpus_per_node else ""
    tasks = f", in {len(job.options.variants)} variants" if job.options.variants else ""
    each = " each" if most > 1 else ""
    return (
        f"Trains {job.path} on {nodes} with {resources}{each}{tasks}; resumes where an earlier job stopped."
    )


def _layout_note(job: Job) -> str:
    layout = job.deck.layout
    data = data_ranks(job.deck, job.node_counts[-1] * job.ranks_per_node)
    is_range = job.options.scheduler in {"slurm", "lsf"}
    return (
        f"# On {counted(job.node_counts[-1], 'node')}: pipeline {layout.pipeline} x data {data} x context "
        f"{layout.context} x tensor {layout.tensor}."
        + (" Numbers of nodes that the deck's layout fits:" if is_range else "")
    )


def _read(name: str) -> str:
    return (files("hpctrain.job") / "templates" / name).read_text(encoding="utf-8").rstrip("\n")


def _render(name: str, fields: dict[str, str]) -> str:
    """Return a template with the values of its fields.

    A line is left out if its fields are empty and it has nothing else, or only a request of the scheduler.
    """
    lines = []
    for line in _read(name).split("\n"):
        used = _FIELD.findall(line)
        filled = _FIELD.sub(lambda match: fields[match[1]], line)
        is_empty_request = _REQUEST_LINE.match(line) and any(not fields[each] for each in used)
        if not used or not (is_empty_request or filled.strip() in {"", "#"}):
            lines.append(filled)
    return "\n".join(lines)
