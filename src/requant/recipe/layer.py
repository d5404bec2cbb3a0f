"""What a recipe can see of a model: the names of its layers and of the parts they are made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerNames:
    """One layer that a recipe could reach (a Linear, a fused-MoE layer, ``lm_head``, a router).

    Attributes:
        module: The module's name, with vLLM's fused names: ``model.layers.0.self_attn.qkv_proj``.
        parts: The checkpoint names (without ``.weight``) of the matrices that the module is made of:
            ``(…q_proj, …k_proj, …v_proj)``, each expert's ``…experts.7.gate_proj``; ``(module,)`` for a
            module that is not fused, and for an ``lm_head`` whose weight is tied to the embedding.
        protected: What kind of protected layer it is (``"MoE router"``, ``"lm_head"``), else None. The
            global target never reaches a protected layer; see :func:`requant.recipe.resolve`.
        fixed: Why the model cannot run this layer quantized at all, else None. Printed behind
            ``cannot be quantized: ``.
        not_loaded: Why this layer is not read from the checkpoint (an MTP layer without speculative
            decoding), else None. Such a layer is still matched, and always kept. Printed behind
            ``not loaded: ``.
        aliases: Names that the parts have beside those in ``parts``, where another library calls them otherwise:
            lists as long as ``parts``, each a name for every part. A pattern that matches an alias matches the part.
    """

    module: str
    parts: tuple[str, ...]
    protected: str | None = None
    fixed: str | None = None
    not_loaded: str | None = None
    aliases: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Decision:
    """What a recipe says about one layer.

    Attributes:
        layer: The module's name.
        format: The canonical name of the target format; None: the source's precision is kept.
        pattern: What decided: the override's or exclude's pattern as the user wrote it,
            ``"global_quant_config"`` for the global target, ``""`` when no rule reached the layer.
        reason: For a kept layer, why, as the report prints it (``"excluded by 'lm_head'"``); else ``""``.
    """

    layer: str
    format: str | None
    pattern: str
    reason: str = ""


@dataclass(frozen=True)
class Resolution:
    """A recipe applied to a model.

    Attributes:
        decisions: One per layer, in the order the layers were given, keyed by module name.
        unmatched_patterns: The excludes that match no part of the model, as the user wrote them.
        warnings: One line each, for the log: unmatched excludes, overrides that meet only layers which cannot be
            quantized, protected layers that are quantized.
    """

    decisions: dict[str, Decision]
    unmatched_patterns: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
