"""Choice of a device, and the reasons why torch cannot use the GPUs of a node. Tests of host/device.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpctrain.errors import HpctrainError
from hpctrain.host import device
from hpctrain.host.device import (
    VisibleGpus,
    choose_device,
    configure_allocator,
    device_kind,
    device_of_run,
    gpu_identity,
    prepare_device,
    unusable_gpus,
    visible_gpus,
)

CUDA, NONE = VisibleGpus("cuda", 4), VisibleGpus("", 0)


def test_devices() -> None:
    assert choose_device("auto", 3, NONE) == torch.device("cpu")
    assert choose_device("auto", 5, CUDA) == torch.device("cuda", 1)
    assert choose_device("auto", 1, VisibleGpus("xpu", 2)) == torch.device("xpu", 1)
    assert choose_device("cuda", 2, CUDA) == torch.device("cuda", 2)
    assert choose_device("cpu", 2, CUDA) == torch.device("cpu")
    assert choose_device("cuda:3", 0, CUDA) == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("name", "gpus", "reason"),
    [
        ("cuda", NONE, "torch finds no GPU here"),
        ("xpu", CUDA, 'the GPUs that torch finds here are "cuda"'),
        ("cuda:4", CUDA, "there are 4 GPUs"),
        ("cuda:x", CUDA, "must be"),
        ("gpu", CUDA, "must be"),
        ("cuda:", NONE, "must be"),
        ("cuda:", CUDA, "must be"),
        ("cuda:²", CUDA, "must be"),
    ],
)
def test_devices_that_are_refused(name: str, gpus: VisibleGpus, reason: str) -> None:
    with pytest.raises(HpctrainError, match=f'run.device = "{name}": {reason}'):
        choose_device(name, 0, gpus)


def test_the_types_that_a_plan_assumes() -> None:
    kinds = {name: device_kind(name) for name in ("auto", "cpu", "cuda", "xpu")}
    assert kinds == {
        "auto": torch.device("cpu"),
        "cpu": torch.device("cpu"),
        "cuda": torch.device("cuda"),
        "xpu": torch.device("xpu"),
    }


@pytest.mark.parametrize(("kind", "number"), [("cuda", 2), ("xpu", 2), ("mps", 0)])
def test_accelerators_that_are_used(kind: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert visible_gpus() == VisibleGpus(kind if number else "", number)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of device files, in a process that hides nothing and where torch finds no GPU."""
    monkeypatch.setattr(device, "visible_gpus", lambda: NONE)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("cuda", "version", "reason"),
    [
        (None, "", "this build of torch has no CUDA; install one that has (`make install GPU=cuda`)"),
        ("13.0", "", "torch cannot use them by CUDA 13.0"),
        (
            "13.0",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023",
            "the NVIDIA driver 535.129.03 of this node is too old for CUDA 13.0 of this torch, which needs "
            "driver 580 or newer",
        ),
        (
            "12.6",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build",
            "torch cannot use them by CUDA 12.6",
        ),
    ],
)
def test_why_torch_cannot_use_nvidia_gpus(
    cuda: str | None, version: str, reason: str, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = devices / "version"
    if version:
        driver.write_text(f"{version}\nGCC version: gcc version 12.2.0\n")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert unusable_gpus(devices, driver) == ""
    (devices / "nvidia0").touch()
    assert reason in unusable_gpus(devices, driver)


def test_why_torch_cannot_use_amd_gpus(devices: Path) -> None:
    (devices / "kfd").touch()
    assert "this node has AMD GPUs, but torch cannot use them" in unusable_gpus(devices)


@pytest.mark.parametrize(
    ("banks", "is_gpu"),
    [
        ([], False),
        (["heap_type 0\nsize_in_bytes 67108864000"], False),  # memory of the processor
        (["heap_type 0\nsize_in_bytes 67108864000", "heap_type 1\nsize_in_bytes 536870912"], False),
        (["heap_type 1\nsize_in_bytes 68702699520\nflags 0"], True),
    ],
    ids=["none", "processor", "graphics of a processor", "gpu"],
)
def test_graphics_of_a_processor_are_no_gpu(
    banks: list[str], is_gpu: bool, devices: Path, tmp_path: Path
) -> None:
    (devices / "kfd").touch()
    (tmp_path / "nodes").mkdir()
    for number, bank in enumerate(banks):
        folder = tmp_path / "nodes" / str(number) / "mem_banks" / "0"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(bank + "\n")
    assert bool(unusable_gpus(devices, topology=tmp_path / "nodes")) == is_gpu


def test_a_variable_that_may_select_no_gpu_is_named(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-wrong")
    assert '(if CUDA_VISIBLE_DEVICES="GPU-wrong" names no GPU of this node, unset it)' in unusable_gpus(
        devices
    )


@pytest.mark.parametrize(
    ("name", "value", "file"),
    [
        ("CUDA_VISIBLE_DEVICES", "", "nvidia0"),
        ("CUDA_VISIBLE_DEVICES", "-1", "nvidia0"),
        ("ROCR_VISIBLE_DEVICES", "", "kfd"),
    ],
)
def test_gpus_that_the_user_hides(
    name: str, value: str, file: str, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (devices / file).touch()
    assert unusable_gpus(devices) == f'{name}="{value}" hides the GPUs of this node; unset it'


def test_gpus_that_the_batch_system_has_not_given(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert unusable_gpus(devices) == ""


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_runs_do_not_pass_over_unusable_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "visible_gpus", lambda: NONE)
    monkeypatch.setattr(device, "unusable_gpus", lambda: "they are hidden; show them")
    with pytest.raises(HpctrainError) as refused:
        device_of_run(name, 0)
    told = f'run.device = "{name}": they are hidden; show them, or use "cpu" to compute on the CPU'
    assert refused.value.problems == (told,)
    assert device_of_run("cpu", 0) == torch.device("cpu")


def test_segments_grow_unless_the_user_configures_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    assert configure_allocator({"PYTORCH_CUDA_ALLOC_CONF": ""})
    assert settings == ["expandable_segments:True", "pinned_max_round_threshold_mb:1"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        assert not configure_allocator({name: "max_split_size_mb:128"})
    assert len(settings) == 2


def test_an_old_torch_that_refuses_a_setting_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("Unrecognized key")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    assert not configure_allocator({})


@pytest.mark.parametrize("uuid", [bytes(range(16)), "00010203-0405"])
def test_the_identity_of_a_gpu(uuid: object, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    identity = gpu_identity(torch.device("xpu", 0))
    assert identity is not None and identity.startswith("00010203") and identity.isprintable()
    assert gpu_identity(torch.device("cpu")) is None


@pytest.mark.parametrize("deterministic", [True, False])
def test_users_can_allow_operations_without_deterministic_kernels(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", calls.append)
    prepare_device(torch.device("xpu", 1), deterministic)
    assert calls == [deterministic, torch.device("xpu", 1)]
