"""Actor with LoRA and a vLLM engine in the process of ``vllm_process.one_process``."""

from pathlib import Path
from typing import Any

from tests.helpers.adapter_run import AdapterRun
from tests.helpers.engine_cases import ask, load

_run: AdapterRun | None = None


def start(directory: str, adapters: dict[str, str]) -> dict[str, Any]:
    """Start engine and actor; return the LoRA settings of the engine."""
    global _run
    paths = {name: Path(path) for name, path in adapters.items()}
    _run = AdapterRun("vllm", Path(directory), paths)
    _run.gather_locally()
    config = _run.engine._engine.vllm_config.lora_config
    return {name: getattr(config, name) for name in ("max_loras", "max_lora_rank")}


def running() -> AdapterRun:
    """Return what ``start`` made."""
    assert _run is not None, "start() comes first"
    return _run


def stop() -> None:
    """Close the engine."""
    running().close()


def sync(version: int, is_updated: bool) -> dict[str, float]:
    """Sync the weights, after an update of the policy if ``is_updated``."""
    run = running()
    assert not is_updated or run.update(version)
    return run.sync(version, is_updated)


def measure_gaps(directories: dict[str, str], policy_directory: str) -> dict[str, float]:
    """Return the gaps of ``AdapterRun.measure_gaps`` to the models in ``directories``.

    The gap of ``policy`` is that to the trained policy, which is written to ``policy_directory``.
    """
    run = running()
    models = {name: load(Path(path)) for name, path in directories.items()}
    if policy_directory:
        models["policy"] = run.export_policy(Path(policy_directory))
    return run.measure_gaps(models)


def sync_lost_adapter(version: int, kind: str) -> str:
    """Update and sync while vLLM loses the adapter; return the error message."""
    run = running()
    manager = run.engine._get_model_runner().lora_manager._adapter_manager
    name, layer = next(iter(manager.modules.items()))
    if kind == "zeroed":  # one layer of the engine keeps no adapter
        layer.set_lora = lambda index, *_: layer.reset_lora(index)
    else:  # vLLM does not adapt the layer
        del manager.modules[name]
    run.update(version)
    try:
        run.sync(version, True)
    except RuntimeError as error:
        return str(error)
    finally:
        if kind == "zeroed":
            del layer.set_lora
        else:
            manager.modules[name] = layer
    return ""


def refusal(model: str) -> str:
    """Return the message with which the engine refuses a request for ``model``."""
    (request,) = ask(1)
    request.model = model
    try:
        running().engine.add(request)
    except ValueError as error:
        return str(error)
    return ""
