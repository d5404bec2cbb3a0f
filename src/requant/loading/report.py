"""The report of a load: which layers were quantized to what, which were kept and why, and what it cost."""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from requant.errors import ConfigError
from requant.loading.plan import Plan
from requant.loading.stream import LoadResult

logger = logging.getLogger(__name__)


def prepare_report(
    plan: Plan, directory: str | None = None, cache_entry: str | None = None
) -> Callable[[LoadResult], str | None]:
    """Make sure, before loading, that its report can be written; the result then writes it.

    It goes to ``directory``, else ``$ATOM_TORCH_PROFILER_DIR``, else the working directory; a folder that does not
    exist is made. There is a report only if there is a recipe.

    Args:
        plan: What will be loaded.
        directory: Where to.
        cache_entry: Where weights that have been quantized before are read from; None: all are quantized now.

    Returns:
        A function that takes what the load cost, writes ``online_quant_info_<YYYYmmdd_HHMMSS>_<ns>.json`` as a whole
        or not at all, logs two lines about it, and returns the file's path; None if there is no recipe.

    Raises:
        ConfigError: Nothing can be written there.
    """
    if not plan.recipe:
        return lambda result: None
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
    return lambda result: _write(plan, result, path, cache_entry)


def _write(plan: Plan, result: LoadResult, directory: Path, cache_entry: str | None) -> str:
    planned = plan.to_report()
    head = {key: planned.pop(key) for key in ("model", "online_quant_config")}
    measured = {
        "elapsed_seconds": result.elapsed_seconds,
        "load_seconds": result.load_seconds,
        "peak_device_memory_gb": result.peak_device_memory / 1e9,
        "bytes_sent": result.bytes_sent,
        "cache_entry": cache_entry,
    }
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
    return str(path)
