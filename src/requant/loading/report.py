"""The report of a load: which layers were quantized to what, which were kept and why, and what it cost."""

import json
import logging
import os
import tempfile
import time
from pathlib import Path

from requant.errors import ConfigError
from requant.loading.plan import Plan
from requant.loading.stream import LoadResult

logger = logging.getLogger(__name__)


def report_directory(directory: str | None) -> Path:
    """Where the report goes: ``directory``, else ``$ATOM_TORCH_PROFILER_DIR``, else the working directory.

    Made if it does not exist. To be asked before loading, so that a load is not lost to its report.

    Raises:
        ConfigError: Nothing can be written there.
    """
    path = Path(directory or os.environ.get("ATOM_TORCH_PROFILER_DIR") or ".")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {path}: {error.strerror or error}; "
            "--online-quant-info-dir takes a writable folder"
        ) from error
    return path


def write_report(plan: Plan, result: LoadResult, directory: Path) -> Path:
    """Write ``online_quant_info_<YYYYmmdd_HHMMSS>_<ns>.json`` as a whole or not at all, and log both lines about it.

    Args:
        plan: What was planned, and done.
        result: What it cost.
        directory: From :func:`report_directory`.

    Raises:
        ConfigError: It cannot be written after all.
    """
    planned = plan.to_report()
    measured = {
        "elapsed_seconds": result.elapsed_seconds,
        "load_seconds": result.load_seconds,
        "peak_device_memory_gb": result.peak_device_memory / 1e9,
    }
    head = {key: planned.pop(key) for key in ("model", "online_quant_config")}
    now = time.time_ns()
    stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now // 10**9))
    path = directory / f"online_quant_info_{stamp}_{now}.json"
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps({**head, **measured, **planned}, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the report {path}: {error.strerror or error}") from error
    logger.info(
        "Weight post-processing done: %.2f seconds, %d layers online-quantized",
        result.elapsed_seconds,
        len(plan.quantized),
    )
    logger.info("Online quantization info saved to %s", path)
    return path
