"""Rules on what a model computes on another number of ranks: BatchNorm and the learning rate."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts, Wrap
from dure.scripts.lint.finding import Edit, Report, inserted_before
from dure.scripts.lint.modules import (
    Module,
    argument,
    constant,
    last,
    method,
    plain_name,
    subtree,
    words,
)

NORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm1d", "LazyBatchNorm2d"}
NORMED_MODELS = ("resnet", "resnext", "wide_resnet", "densenet", "mobilenet", "efficientnet", "regnet", "inception",
    "googlenet",
                 "shufflenet", "mnasnet", "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn", "wrn", "preact")  # fmt: skip


def norm_not_synced(facts: Facts) -> Iterator[Report]:
    """Find wraps of models with BatchNorm that nothing synchronises."""
    named = {word.lower() for word in facts.names | facts.words}
    if any("sync" in word and ("bn" in word or "batchnorm" in word or "norm" in word) for word in named):
        return
    if any("frozenbatchnorm" in word for word in named):
        return
    layer = _batch_norm(facts)
    if layer is None:
        return
    done: set[Module] = set()
    for wrap in facts.wraps:
        if wrap.kind == "fsdp" or wrap.module in done or wrap.model is None:
            continue
        if wrap.kind == "dp" and any(other.kind == "ddp" for other in facts.wraps):
            continue
        if not _has_norm(facts, wrap) or not _trains(facts):
            continue
        done.add(wrap.module)
        who = "device" if wrap.kind == "dp" else "rank"
        edits: tuple[Edit, ...] = ()
        name = plain_name(wrap.model)
        if wrap.kind == "ddp" and name and "torch" in wrap.module.imports:
            line = f"{name} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({name})"
            edits = inserted_before(wrap.module, wrap.module.statement_of(wrap.call), [line])
        cure = (
            "Convert the model before it is wrapped: `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`; for "
            "DataParallel there is "
            "none: use DistributedDataParallel, or keep the batch of each device large."
        )
        yield Report(
            module=wrap.module,
            node=wrap.call,
            what=f"the model has {layer}: each {who} normalises by the mean and variance of its own part of the "
            f"batch, so the result changes "
            f"with the number of {who}s, most with few samples on each; only one {who}'s running statistics are saved",
            cure=cure,
            edits=edits,
        )


def _trains(facts: Facts) -> bool:
    return bool(facts.step_loops)


def _batch_norm(facts: Facts) -> str | None:
    for _, _, name in facts.calls():
        if last(name) in NORMS:
            return last(name)
        if name.startswith(("torchvision.models.", "timm.")) and last(name).lower().startswith(NORMED_MODELS):
            return f"BatchNorm ({last(name)})"
    for _, call, name in facts.calls():
        first = constant(call.args[0]) if call.args else ...
        if (
            last(name) in ("create_model", "get_model")
            and isinstance(first, str)
            and first.lower().startswith(NORMED_MODELS)
        ):
            return f"BatchNorm ({first})"
    return None


def _has_norm(facts: Facts, wrap: Wrap) -> bool:
    """Return whether the wrapped model may be one with BatchNorm: not if its class is known to have none."""
    assert wrap.model is not None
    classes = []
    for other, call, name in facts.project.calls_behind(wrap.module, wrap.model):
        found = facts.project.definition(other, call.func)
        if found is None or not isinstance(found[1], ast.ClassDef):
            if name.startswith("torchvision.models") or last(name) in ("create_model", "get_model"):
                return True
            if name.startswith("torch.nn.") and last(name) != "Sequential":
                continue
            if last(name).lower().startswith(NORMED_MODELS):
                return True
            inner = [n for n in subtree(call) if isinstance(n, ast.Call)]
            if any(last(other.called(n)) in NORMS for n in inner):
                return True
            continue
        classes.append(found)
    seen: set[ast.AST] = set()
    while classes:
        module, cls = classes.pop()
        if cls in seen:
            continue
        seen.add(cls)
        for item in subtree(cls):
            if isinstance(item, ast.Name | ast.Attribute) and last(module.resolved(item)) in NORMS:
                return True
            if isinstance(item, ast.Call):
                name = module.called(item)
                if name.startswith("torchvision.models.") and last(name).lower().startswith(NORMED_MODELS):
                    return True
                found = facts.project.definition(module, item.func)
                if found is not None:
                    classes.append(found)
            elif isinstance(item, ast.Name) and (found := facts.project.definition(module, item)) is not None:
                classes.append(found)
    return False


# --- learning rate


def rate_not_scaled(facts: Facts) -> Iterator[Report]:
    """Find learning rates that stay while the number of ranks changes the batch."""
    if not facts.divides_itself or facts.deepspeed or not facts.is_entry or not facts.step_loops:
        return
    if not any(item.use == "train" for item in facts.loaders) or _is_size_used(facts):
        return
    optimizers = [
        (module, call)
        for module, call in facts.optimizers
        if facts.ranks.runs_on_ranks(module, call)
        and not module.is_context
        and not facts.ranks.is_without_ranks(module, call)
    ]
    for module, call in optimizers[:1]:
        rate = argument(call, "lr", 1)
        if rate is None:
            continue
        shown = " ".join(module.source.segment(rate).split())
        yield Report(
            module=module,
            node=call,
            what=f"the batch of a step grows with the number of ranks, and nothing relates the learning rate "
            f"(`{shown[:40]}`) or the batch of a "
            "rank to it: on other numbers of ranks the same command is another training",
            cure="Divide a global batch size by the world size, or scale the learning rate with it (linear for SGD, "
            "with warmup; "
            "the square root for Adam).",
        )


SIZES = {"world_size", "get_world_size", "num_processes", "num_replicas", "nprocs", "ngpus", "ngpus_per_node",
    "n_gpus", "num_gpus",
         "ddp_world_size", "device_count", "n_gpu", "num_tasks", "global_size", "gpus", "WORLD_SIZE", "world",
         "num_devices"}  # fmt: skip


def _is_size_used(facts: Facts) -> bool:
    """Return whether the number of ranks is in a calculation with a batch size, a learning rate or accumulation."""
    for module in facts.project.modules:
        for node in module.nodes:
            if isinstance(node, ast.BinOp | ast.AugAssign):
                if not isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv | ast.Pow):
                    continue
                text = words(node)
                if isinstance(node, ast.BinOp):
                    statement = module.statement_of(node)
                    text |= {w for t in getattr(statement, "targets", []) for w in words(t)}
                    text |= {item.arg for item in module.above(node) if isinstance(item, ast.keyword) and item.arg}
                    if isinstance(node.op, ast.FloorDiv) and not any("worker" in word.lower() for word in text):
                        text.add("batch")  # what else is divided by ranks, without a remainder
                if _names_size(facts, module, node) and any(_is_scaled(word) for word in text):
                    return True
            elif (
                isinstance(node, ast.Call)
                and method(node) in ("size", "get_world_size")
                and not node.args
                and facts.horovod
            ):
                above = next((a for a in module.above(node) if isinstance(a, ast.BinOp)), None)
                if above is not None and any(_is_scaled(word) for word in words(module.statement_of(above))):
                    return True
    return False


def _names_size(facts: Facts, module: Module, node: ast.AST) -> bool:
    if words(node) & SIZES or any(constant(item) == "WORLD_SIZE" for item in subtree(node)):
        return True
    for item in subtree(node):
        if isinstance(item, ast.Name | ast.Attribute):
            for origin in facts.project.origins(module, item):
                if not isinstance(origin.node, ast.arg) and words(origin.node) & SIZES:
                    return True
        if isinstance(item, ast.Call) and module.called(item).startswith("horovod.") and method(item) == "size":
            return True
    return False


def _is_scaled(word: str) -> bool:
    word = word.lower()
    return word in ("lr", "bs", "blr") or "lr" in word.split("_") or any(
        part in word for part in ("batch", "learning_rate", "accum", "lr_scal", "scaler", "base_lr")
    )  # fmt: skip
