"""Rules on the random numbers of ranks: weights that must be equal, augmentation that must not."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts
from dure.scripts.lint.finding import Edit, Report
from dure.scripts.lint.modules import (
    FUNCTIONS,
    Module,
    argument,
    below,
    constant,
    keyword,
    last,
    method,
    plain_name,
    subtree,
    words,
)

SEEDING = {"manual_seed", "manual_seed_all", "seed", "seed_everything", "set_seed", "setup_seed", "seed_all",
    "fix_seed", "random_seed",
           "set_random_seed", "init_seeds", "fix_random_seeds", "seed_torch", "set_seeds", "init_seed"}  # fmt: skip
DRAWING = ("Random", "RandAugment", "AutoAugment", "TrivialAugment", "ColorJitter", "AugMix", "GaussianBlur",
    "HorizontalFlip", "Mixup",
           "CutMix", "RandomResizedCrop", "ShiftScaleRotate", "Rotate")  # fmt: skip


def _seeds(facts: Facts) -> list[tuple[Module, ast.Call, ast.expr]]:
    found = []
    for module, call, name in facts.calls():
        leaf = last(name)
        if leaf not in SEEDING or not call.args or not facts.ranks.runs_on_ranks(module, call):
            continue
        around = {method(item) for item in subtree(module.scope_of(call)) if isinstance(item, ast.Call)}
        if isinstance(module.scope_of(call), FUNCTIONS) and around & {
            "get_rng_state",
            "getstate",
            "get_state",
            "fork_rng",
        }:
            continue  # the state comes back afterwards
        is_of_library = name.startswith(
            ("torch.", "random.", "numpy.", "accelerate.", "lightning", "pytorch_lightning")
        )
        if is_of_library or (leaf != "seed" and (leaf != "manual_seed" or name.startswith("torch"))):
            owner = module.called(call)
            if leaf == "manual_seed" and not owner.startswith("torch."):
                continue  # of a generator of its own
            found.append((module, call, call.args[0]))
    return found


def _depends(facts: Facts, module: Module, value: ast.expr) -> bool:
    if facts.ranks.depends_on_rank(module, value):
        return True
    return any("rank" in word.lower() or "worker" in word.lower() for word in words(value))


def seeds_equal(facts: Facts) -> Iterator[Report]:
    """Find seeds that are equal on all ranks where augmentation draws random numbers."""
    if not facts.has_group or facts.deepspeed:
        return
    seeds = _seeds(facts)
    if not seeds or any(_depends(facts, module, value) for module, _, value in seeds):
        return
    if any("seed" in w.lower() and "rank" in w.lower() for w in facts.words) or "worker_init_fn" in facts.words:
        return
    seeds = [
        s for s in seeds if not facts.ranks.is_without_ranks(s[0], s[1]) and facts.ranks.reached_by(s[0], s[1]) is None
    ]
    seeds = [s for s in seeds if not isinstance(s[0].scope_of(s[1]), FUNCTIONS) or _is_called(facts, s[0], s[1])]
    if any(_adds_rank(facts, module, value) for module, _, value in seeds):
        return
    drawn = _augmentation(facts)
    seeds.sort(key=lambda item: not item[0].called(item[1]).startswith("torch."))
    if drawn is None or not seeds:
        return
    module, call, value = seeds[0]
    name = plain_name(value) or module.source.segment(value)
    edits: tuple[Edit, ...] = ()
    yield Report(
        module=module,
        node=call,
        what=f"all ranks begin with the same seed (`{name[:40]}`), and their `{drawn}` draws from it: the samples at "
        f"the same place of each "
        "rank's batch get the same random crop, flip or noise",
        cure="Add the rank once the model is built: `torch.manual_seed(seed + rank)` (and `random`, `numpy`); DDP "
        "gives all ranks rank 0's weights.",
        edits=edits,
    )


def _is_called(facts: Facts, module: Module, call: ast.Call) -> bool:
    scope = module.scope_of(call)
    return isinstance(scope, FUNCTIONS) and (bool(facts.project.sites.get(scope)) or scope in facts.ranks.spawned)


def _adds_rank(facts: Facts, module: Module, value: ast.expr) -> bool:
    for item in subtree(value):
        if isinstance(item, ast.Name):
            scope = module.scope_of(value)
            for node in below(scope, into_functions=False):
                if (
                    isinstance(node, ast.AugAssign)
                    and plain_name(node.target) == item.id
                    and _depends(facts, module, node.value)
                ):
                    return True
    return False


def _augmentation(facts: Facts) -> str | None:
    for module, call, name in facts.calls():
        leaf = last(name)
        if (
            leaf.startswith(DRAWING)
            and not leaf.endswith(("Sampler", "Split"))
            and leaf not in ("Random", "RandomState")  # generators, with seeds of their own
            and leaf[:1].isupper()
        ):
            return leaf
        scope = module.scope_of(call)
        if (
            isinstance(scope, FUNCTIONS)
            and scope.name == "__getitem__"
            and (
                name.startswith(("random.", "numpy.random."))
                or name
                in (
                    "torch.rand",
                    "torch.randn",
                    "torch.randint",
                    "torch.rand_like",
                    "torch.randn_like",
                )
            )
        ):
            return name
    return None


def seeds_differ(facts: Facts) -> Iterator[Report]:
    """Find models that ranks build from different random numbers, with nothing that makes them equal."""
    if not facts.has_group or facts.accelerate or facts.fabric or facts.deepspeed or facts.lightning:
        return
    if facts.names & {"load_checkpoint", "sync_params", "sync_module_states", "broadcast_params", "broadcast_model"}:
        return
    kinds = {wrap.kind for wrap in facts.wraps}
    without_sync = next((w for w in facts.wraps if constant(keyword(w.call, "init_sync")) is False), None)
    if "ddp" in kinds and without_sync is None:
        return
    is_manual = _averages_gradients(facts)
    if not (is_manual or without_sync or (facts.horovod and "DistributedOptimizer" in facts.names) or "fsdp" in kinds):
        return
    if facts.names & {
        "broadcast_parameters",
        "broadcast",
        "broadcast_",
        "broadcast_object_list",
        "broadcast_coalesced",
        "_broadcast_coalesced",
        "set_model_state_dict",
        "to_empty",
    }:
        return
    if "sync_module_states" in facts.words or ("from_pretrained" in facts.names and "fsdp" in kinds):
        return
    seeds = _seeds(facts)
    apart = next(((m, c, v) for m, c, v in seeds if _depends(facts, m, v) or _adds_rank(facts, m, v)), None)
    if apart is None and (seeds or "fsdp" in kinds):
        return
    model = _model_built(facts)
    place = (apart[0], apart[1]) if apart is not None else model
    if place is None:
        return
    if (
        apart is not None
        and model is not None
        and apart[0] is model[0]
        and apart[0].scope_of(apart[1]) is model[0].scope_of(model[1])
    ) and apart[1].lineno > model[1].lineno:
        return  # the weights are drawn before
    why = "seeded with its rank" if apart is not None else "not seeded"
    yield Report(
        module=place[0],
        node=place[1],
        what=f"each rank is {why} before it builds its model, and nothing makes the weights equal: the ranks average "
        f"gradients of "
        "different models",
        cure="Seed all ranks alike until the model is built, or broadcast rank 0's parameters and buffers before the "
        "first step.",
    )


def _averages_gradients(facts: Facts) -> bool:
    """Return whether the script reduces gradients by itself."""
    for module, call, name in facts.calls():
        if last(name) in ("all_reduce", "allreduce", "allreduce_") and facts.collective(module, call):
            value = call.args[0] if call.args else keyword(call, "tensor")
            if value is not None and any("grad" in word.lower() for word in words(value)):
                return True
            if value is not None and _is_item_of_gradients(facts, module, value):
                return True
            if value is not None and isinstance(value, ast.Name):
                for origin in facts.project.origins(module, value):
                    if not isinstance(origin.node, ast.arg) and any("grad" in w.lower() for w in words(origin.node)):
                        return True
    return False


def _is_item_of_gradients(facts: Facts, module: Module, value: ast.expr) -> bool:
    """Return whether a value is the variable of a loop over gradients."""
    for loop in module.loops_of(value):
        if isinstance(loop, ast.For) and plain_name(loop.target) == plain_name(value) != "":
            nodes = [o.node for o in facts.project.origins(module, loop.iter)] + [loop.iter]
            if any("grad" in word.lower() for node in nodes for word in words(node)):
                return True
    return False


def _model_built(facts: Facts) -> tuple[Module, ast.Call] | None:
    for module, call in facts.optimizers:
        given = argument(call, "params", 0)
        if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute):
            for other, maker, _ in facts.project.calls_behind(module, given.func.value):
                if facts.ranks.runs_on_ranks(other, maker):
                    return other, maker
    return None
