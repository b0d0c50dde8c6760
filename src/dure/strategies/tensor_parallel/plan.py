"""Division of a model's layers over the ranks of a tensor group: found by rules, or given as text.

The rules are those of Shoeybi et al. 2019 (Megatron-LM), section 3. Of two linear layers with only elementwise modules
between them, the first is cut by columns (of the matrix that x is multiplied by) and the second by rows, so that only
the second's output has to be summed. An attention's projections are cut by heads in the same way; an embedding and an
output layer are cut by the vocabulary. Layers without a rule stay whole. Nothing here needs a process group.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from torch import nn

from dure.strategies.state.module_patterns import matching, shortened
from dure.torchcompat.compilation import compiled_modules

OPTION = "--tensor-parallel.plan (under fsdp --fsdp.tensor-plan, under pipeline --pipeline.tensor-plan)"
"""Options with a given plan, as messages name them."""

STYLES = {
    "column": "output features divided, and the output left divided",
    "fused": "queries, keys and values of one layer divided by heads, their rows brought together in forward",
    "gathered": "output features divided, the output gathered",
    "row": "input features divided, the output added up",
    "vocab": "an Embedding's rows divided, the output added up",
}
"""Styles of a layer, by their names in a plan, with descriptions."""

_SHARD_DIM = {"column": 0, "fused": 0, "gathered": 0, "vocab": 0, "row": 1}
"""Dimension of the weight that is divided, by style."""

_WITH_WHOLE = "its weight is shared with a whole layer"
"""Reason to leave a layer whole."""

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Dropout, nn.Identity),
)

_PAIRS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate", "up"), "down"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("up_proj",), "down_proj"),
    (("up",), "down"),
    (("w1",), "w2"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("c_fc",), "c_proj"),
    (("mlp_in",), "mlp_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
"""Names of the widening and the narrowing layers in two-layer networks. A wrong guess costs a gather, but never changes
the result.
"""

_PROJECTIONS = (
    *(("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("wq", "wk", "wv")),
    *(("to_q", "to_k", "to_v"), ("q_lin", "k_lin", "v_lin")),
)
_FUSED = ("attention_in", "in_proj", "qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "to_qkv")
_OUTPUTS = (*("o_proj", "out_proj", "wo", "to_out", "proj", "o", "out", "out_lin", "dense", "c_proj", "attention_out"),)
_HEAD_COUNTS = ("num_heads", "heads", "n_heads", "n_head", "num_attention_heads", "nhead", "h")
_KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


@dataclass(kw_only=True)
class TensorPlan:
    """Plan for each layer."""

    styles: dict[str, str] = field(default_factory=dict)
    """Style of each layer, one of `STYLES`, by the layer's name in the model."""
    reasons: dict[str, list[str]] = field(default_factory=dict)
    """Reasons why some layers are not divided, or not as they could be: sentences with `{}` for the names, and the
    names.
    """
    regions: list[tuple[str, ...]] = field(default_factory=list)
    """Layers between which values stay divided; the last one ends the region."""
    faults: list[str] = field(default_factory=list)
    """Faults of a given plan."""

    @property
    def notes(self) -> list[str]:
        """Reasons as whole sentences."""
        return [sentence.replace("{}", shortened(names)) for sentence, names in self.reasons.items()]

    def note(self, name: str, sentence: str) -> None:
        """Add the reason why a layer is not divided, or not as it could be."""
        self.reasons.setdefault(sentence, []).append(name)

    def region_of(self, name: str) -> tuple[str, ...]:
        """Return the region that contains a layer; the layer alone if there is none."""
        return next((region for region in self.regions if name in region), (name,))

    def add_region(self, styles: dict[str, str]) -> None:
        """Add layers between which values stay divided; those of a shared module are already there."""
        if not any(name in self.styles for name in styles):
            self.styles.update(styles)
            self.regions.append(tuple(styles))

    def leave_out_others(self, model: nn.Module, blocks: Iterable[str]) -> None:
        """Remove all layers but those in some blocks, and of these the ones that share a parameter with another."""
        own = tuple(f"{block}." for block in blocks)
        self.styles = {name: style for name, style in self.styles.items() if f"{name}.".startswith(own)}
        for names in _sharing(model):
            if not all(name in self.styles for name in names):
                self.leave_whole([name for name in names if name in self.styles], _WITH_WHOLE)

    def leave_whole(self, names: Iterable[str], why: str) -> None:
        """Remove layers from the plan."""
        for name in names:
            self.styles.pop(name, None)
            self.note(name, f"{{}} whole: {why}")


def shard_dim(style: str) -> int:
    """Return the divided dimension of a layer's weight."""
    return _SHARD_DIM[style]


def is_dividable(module: nn.Module) -> bool:
    """Return whether there is a rule for a module.

    A subclass may compute something else with the same parameters. So may an object whose `forward` was replaced, or
    whose weight is computed from others in each forward pass (weight norm, pruning).
    """
    if type(module) not in (nn.Linear, nn.Embedding) or "forward" in vars(module):
        return False
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return "weight" in names and names <= {"weight", "bias"}


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and is_dividable(module)


def find_plan(model: nn.Module, num_ranks: int) -> TensorPlan:
    """Apply the rules to a model.

    Args:
        model: Model; its values are not used.
        num_ranks: Ranks of a tensor group.
    """
    plan = TensorPlan()
    for prefix, parent in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        layers = {name: child for name, child in parent.named_children() if _is_linear(child)}
        if type(parent) is nn.Sequential:
            regions = list(_chains(parent))
        else:
            regions = [*_attention(plan, dot, parent, layers, num_ranks), *_two_layer_networks(layers)]
        for region in regions:
            plan.add_region({dot + name: style for name, style in region.items()})
    for name, module in model.named_modules():
        if name and name not in plan.styles and is_dividable(module):
            plan.styles[name] = "gathered" if isinstance(module, nn.Linear) else "vocab"
        elif isinstance(module, nn.MultiheadAttention):
            why = (
                "nn.MultiheadAttention keeps queries, keys and values in one parameter; with Linear layers named "
                "q_proj, k_proj, v_proj and out_proj its heads would be divided"
            )
            plan.leave_whole([name], why)
    _leave_out_unsuited(plan, model)
    _agree_on_tied(plan, model)
    _leave_out_small(plan, model, num_ranks)
    return plan


def _chains(parent: nn.Sequential) -> Iterator[dict[str, str]]:
    """Yield pairs of linear layers with only elementwise modules between them; each is in one pair."""
    first: str | None = None
    for name, child in parent.named_children():
        if not _is_linear(child):
            first = first if type(child) in _ELEMENTWISE else None
        elif first is None:
            first = name
        else:
            yield {first: "column", name: "row"}
            first = None


def _two_layer_networks(layers: dict[str, nn.Linear]) -> Iterator[dict[str, str]]:
    taken: set[str] = set()
    for wide, narrow in _PAIRS:
        names = (*wide, narrow)
        if not all(name in layers for name in names) or taken & set(names):
            continue
        if all(layers[name].out_features == layers[narrow].in_features for name in wide):
            taken |= set(names)
            yield {**dict.fromkeys(wide, "column"), narrow: "row"}


def _attention(
    plan: TensorPlan, dot: str, parent: nn.Module, layers: dict[str, nn.Linear], num_ranks: int
) -> Iterator[dict[str, str]]:
    """Yield an attention's projections and the layer after them, if its heads can be divided."""
    output = next((name for name in _OUTPUTS if name in layers), None)
    if output is None:
        return
    width = layers[output].in_features
    inputs: dict[str, str] = {}
    for fused in _FUSED:
        if fused in layers and layers[fused].out_features == 3 * width:
            inputs = {fused: "fused"}
    for names in _PROJECTIONS:
        if all(name in layers for name in names) and layers[names[0]].out_features == width:
            inputs = dict.fromkeys(names, "column")
    if not inputs:
        return
    heads = [count for counts in (_HEAD_COUNTS, _KEY_HEAD_COUNTS) if (count := _first_count(parent, counts))]
    first, where = f"{dot}{next(iter(inputs))}", "every rank computes all heads that come from {}"
    if not heads or width % heads[0]:
        known = ", ".join(_HEAD_COUNTS[:4])
        plan.note(first, f"{where}: the number of heads is not found ({known} of {type(parent).__name__})")
    elif any(count % num_ranks for count in heads):
        plan.note(first, f"{where}: {min(heads)} heads do not divide by {num_ranks} ranks")
    else:
        yield {**inputs, output: "row"}


def _first_count(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = (getattr(module, name, None) for name in names)
    return next((count for count in found if type(count) is int and count > 0), None)


def _leave_out_unsuited(plan: TensorPlan, model: nn.Module) -> None:
    for name in list(plan.styles):
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Embedding) and (reason := _embedding_fault(layer)):
            plan.leave_whole([name], reason)


def _embedding_fault(layer: nn.Embedding) -> str | None:
    if layer.sparse:
        return "its gradient is sparse (sparse=True)"
    if layer.max_norm is not None:
        return "it changes its rows in forward (max_norm)"
    if layer.scale_grad_by_freq:
        return "it scales gradients by how often a row is used (scale_grad_by_freq)"
    return None


def _agree_on_tied(plan: TensorPlan, model: nn.Module) -> None:
    """Make layers that share a weight cut it in the same dimension; a weight shared with a whole layer stays whole."""
    for names in _sharing(model):
        if not any(name in plan.styles for name in names):
            continue
        if not all(name in plan.styles for name in names):
            plan.leave_whole([name for name in names if name in plan.styles], _WITH_WHOLE)
            continue
        if len({_SHARD_DIM[plan.styles[name]] for name in names}) > 1:
            for other in {other for name in names for other in plan.region_of(name)}:
                if plan.styles.get(other) in ("column", "fused", "row"):
                    plan.styles[other] = "gathered"
            plan.regions = [region for region in plan.regions if plan.styles.get(region[-1]) == "row"]


def _sharing(model: nn.Module) -> list[list[str]]:
    """Return the names of two or more modules that share parameters, directly or through a third one."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    groups: list[dict[str, None]] = []
    for names in owners.values():
        joined = dict.fromkeys(names)
        for group in [group for group in groups if not group.keys().isdisjoint(joined)]:
            groups.remove(group)
            joined = group | joined
        groups.append(joined)
    return [list(group) for group in groups if len(group) > 1]


def _leave_out_small(plan: TensorPlan, model: nn.Module, num_ranks: int) -> None:
    for name in list(plan.styles):
        if name not in plan.styles:
            continue
        size = _divided_size(model, name, plan.styles[name])
        if not _suffices(size, num_ranks):
            tied = {name, *(other for names in _sharing(model) if name in names for other in names)}
            together = {other for one in tied for other in plan.region_of(one)}
            plan.leave_whole(
                sorted(other for other in together if other in plan.styles),
                f"{size} is too few to give each of {num_ranks} ranks some",
            )
    plan.regions = [region for region in plan.regions if region[-1] in plan.styles]


def _divided_size(model: nn.Module, name: str, style: str) -> int:
    weight = model.get_submodule(name).weight
    return int(weight.shape[_SHARD_DIM[style]])  # type: ignore[index]


def _suffices(size: int, num_ranks: int) -> bool:
    """Return whether the last rank gets a nonempty part if the others have the rounded-up size of the first."""
    return (num_ranks - 1) * -(-size // num_ranks) < size


def read_plan(text: str, model: nn.Module, num_ranks: int) -> TensorPlan:
    """Return the plan that a text describes; layers that it does not name stay whole.

    Args:
        text: `blocks.*.up=column,blocks.*.down=row`: patterns of names, and one of `STYLES` for each.
        model: Model; its values are not used.
        num_ranks: Ranks of a tensor group.
    """
    plan = TensorPlan()
    for word in text.split(","):
        pattern, equals, style = (part.strip() for part in word.partition("="))
        if not equals or style not in STYLES:
            known = ", ".join(STYLES)
            plan.faults.append(f"plan says {word.strip()!r}, but must say a name and one of {known}, as mlp.0=column")
            continue
        found = list(matching(model, pattern))
        if not found:
            children = ", ".join(name for name, _ in model.named_children())
            plan.faults.append(f"plan names {pattern}, which fits no module of the model: its own are {children}")
        for name, module in found:
            if fault := _style_fault(name, module, style, num_ranks):
                plan.faults.append(fault)
            plan.styles[name] = style
    if not plan.faults:
        plan.faults += [
            f"plan cuts {' and '.join(names)}, which share a parameter, in different ways: name all or none of "
            "them, as gathered and vocab"
            for names in _sharing(model)
            if len({_SHARD_DIM.get(plan.styles.get(name, "")) for name in names}) > 1
        ]
    return plan


def _style_fault(name: str, module: nn.Module, style: str, num_ranks: int) -> str | None:
    kind = type(module).__name__
    if not is_dividable(module):
        return f"plan names {name} ({kind}), which has no rule: name nn.Linear and nn.Embedding layers"
    if isinstance(module, nn.Embedding) != (style == "vocab"):
        return f"plan makes {name} ({kind}) {style}: an Embedding can be vocab, and a Linear any other"
    if isinstance(module, nn.Embedding) and (reason := _embedding_fault(module)):
        return f"plan names {name}, which cannot be divided: {reason}"
    size = int(module.weight.shape[_SHARD_DIM[style]])  # type: ignore[index]
    if style == "fused" and size % (3 * num_ranks):
        return f"plan makes {name} fused, but its {size} outputs are not three times as many for {num_ranks} ranks"
    if not _suffices(size, num_ranks):
        return f"plan divides {name}, whose {size} is too few to give each of {num_ranks} ranks some: leave it out"
    return None


def whole_layers(model: nn.Module, plan: TensorPlan) -> list[str]:
    """Return the names of modules whose own parameters the plan does not divide."""
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if name not in plan.styles and any(True for _ in module.parameters(recurse=False))
    ]


def plan_of(model: nn.Module, num_ranks: int, given: str | None) -> TensorPlan:
    """Return the plan that is given as text, or else the one that the rules find."""
    return find_plan(model, num_ranks) if given is None else read_plan(given, model, num_ranks)


def nothing_to_divide(model: nn.Module, plan: TensorPlan, num_ranks: int) -> list[str]:
    """Return a fault if a plan divides no layer."""
    if plan.styles:
        return []
    whole = whole_layers(model, plan)
    shown = shortened(whole[:8]) + (f" and {len(whole) - 8} more" if len(whole) > 8 else "")
    reasons = "".join(f"; {note}" for note in plan.notes)
    return [
        f"there is no layer to divide over {num_ranks} ranks, since the rules know nn.Linear and nn.Embedding and "
        f"the model's layers are {shown}{reasons}: use fsdp without an axis tensor, which divides any parameter"
    ]


def axis_faults(
    model: nn.Module, num_ranks: int, given: str | None, settings: Mapping[str, bool], others: str
) -> list[str]:
    """Return the faults of an axis `tensor` of a mesh with others: its plan, and what does not go with divided layers.

    Args:
        model: Whole model.
        num_ranks: Ranks along the axis.
        given: Plan as text; None for the one that the rules find.
        settings: Settings that do not go with it, and whether each is set.
        others: The other axes, in words.
    """
    plan = plan_of(model, num_ranks, given)
    cure = f"leave it out, or use a mesh of {others} alone"
    if compiled := compiled_modules(model):
        plan.faults.append(
            f"the task compiles {shortened(name or 'the model' for name in compiled)}, which does not go with layers "
            f"that are divided over the axis tensor: {cure}"
        )
    return [
        *(plan.faults or nothing_to_divide(model, plan, num_ranks)),
        *(
            f"{name} does not go with layers that are divided over the axis tensor: {cure}"
            for name, is_set in settings.items()
            if is_set
        ),
    ]


def needless_options(axis: str, plan: str | None, *, is_sequence_parallel: bool) -> list[str]:
    """Return the faults of options about divided layers where the axis `tensor` has one rank.

    Args:
        axis: An axis of the strategy, for the example.
        plan: Given plan, or None.
        is_sequence_parallel: Whether values between divided layers are to be divided.
    """
    given = {"tensor_plan": plan is not None, "sequence_parallel": is_sequence_parallel}
    return [
        f"{name} is about layers that the axis tensor of the mesh divides, which has one rank: name it, as in --mesh "
        f"{axis}=2,tensor=2, or leave {name} out"
        for name, is_given in given.items()
        if is_given
    ]
