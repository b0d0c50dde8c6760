"""Rules on losses and metrics: sums and means over ranks."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import REDUCING, Facts
from dure.scripts.lint.finding import Report
from dure.scripts.lint.modules import (
    FUNCTIONS,
    MOVES,
    Module,
    below,
    constant,
    keyword,
    last,
    method,
    plain_name,
    subtree,
    words,
)

REDUCING_WORDS = ("reduce", "gather", "synchronize", "sync_", "all_avg", "dist_average", "average_tensor", "sync_dist")
METRIC_WORDS = (
    "loss", "acc", "correct", "metric", "top1", "top5", "error", "score", "auc", "f1", "prec", "recall", "total",
    "dice",
    "pred", "label", "target", "iou", "ppl", "perplexity", "psnr", "mae", "rmse", "mse", "hits",
)  # fmt: skip


def _is_metric(name: str) -> bool:
    return any(word in name.lower() for word in METRIC_WORDS)


def _is_reduction(facts: Facts, module: Module, call: ast.Call) -> bool:
    name = method(call).lower()
    if name in ("reduce_mean", "reduce_sum") and module.called(call).startswith("tf."):
        return False
    if name in REDUCING or facts.collective(module, call) in REDUCING:
        return name not in ("gather", "reduce") or bool(facts.collective(module, call)) or not _is_tensors(module, call)
    if any(word in name for word in REDUCING_WORDS) and name not in ("synchronize", "reducelronplateau"):
        return True
    return keyword(call, "sync_dist") is not None


def _is_tensors(module: Module, call: ast.Call) -> bool:
    """Return whether a call is `gather` of a tensor or `torch.gather`."""
    return module.called(call) == "torch.gather" or keyword(call, "dim") is not None or len(call.args) > 1


# --- means of means


def mean_of_means(facts: Facts) -> Iterator[Report]:
    """Find averages over ranks of what each rank has averaged already."""
    if not (facts.has_group or facts.accelerate or facts.fabric or facts.wraps):
        return
    seen: set[int] = set()
    yield from _means_of_batches(facts)
    for module, call, name in facts.calls():
        leaf = last(name)
        value = call.args[0] if call.args else keyword(call, "tensor")
        if leaf in ("all_gather_object", "gather_object") and len(call.args) > 1:
            value = call.args[1] if leaf == "all_gather_object" else call.args[0]
        elif leaf not in (
            "all_reduce",
            "reduce",
            "allreduce",
            "gather",
            "all_gather",
            "allreduce_",
            "gather_for_metrics",
        ):
            continue
        if value is None or facts.in_training(module, call):
            continue
        if not facts.collective(module, call) or not _averages(facts, module, call, leaf, value):
            continue
        mean = _local_mean(facts, module, value)
        if mean is None or call.lineno in seen or _is_weighted(facts, module, call):
            continue
        seen.add(call.lineno)
        yield Report(
            module=module,
            node=call,
            what=f"`{mean}` is already a mean over this rank's samples or batches; the mean of such means counts the "
            f"samples of a "
            "rank with fewer of them, or of a short last batch, more than the others",
            cure="Reduce sums, divide once: all_reduce (SUM) the sum of the values and the number of samples, "
            "then divide.",
        )


def _means_of_batches(facts: Facts) -> Iterator[Report]:
    """Find evaluations that divide a sum of batch means by the number of batches."""
    for module, loop, source in facts.iterations:
        if (
            not isinstance(loop, ast.stmt)
            or not facts.is_evaluation(module, loop)
            or not is_loader(facts, module, source)
        ):
            continue
        loaders = [
            i for i in facts.loaders if any(c is i.call for _, c, _ in facts.project.calls_behind(module, source))
        ]
        if any(constant(keyword(item.call, "drop_last")) is True for item in loaders):
            continue
        scope = module.scope_of(loop)
        for item in below(loop):
            if not (isinstance(item, ast.AugAssign) and isinstance(item.op, ast.Add)) or not isinstance(
                item.target, ast.Name
            ):
                continue
            if not _is_batch_mean(facts, module, item.value):
                continue
            for node in below(scope, into_functions=False):
                found = _division(node, item.target.id)
                if found is None or found[0].lineno <= (loop.end_lineno or 0) or not _is_length_of(found[1], source):
                    continue
                yield Report(
                    module=module,
                    node=node,
                    what=f"`{_short(module, found[0])}` is a mean of the batches' means: a short last batch counts as "
                    "much as a full one, and more ranks make more short batches",
                    cure="Add up `loss * len(batch)` and the number of samples, over the ranks too, and divide once.",
                )


def _division(node: ast.AST, name: str) -> tuple[ast.expr | ast.stmt, ast.expr] | None:
    """Return a node that divides a variable, with what it divides it by."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and plain_name(node.left) == name:
        return node, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) and plain_name(node.target) == name:
        return node, node.value
    return None


def _is_length_of(count: ast.expr, source: ast.expr) -> bool:
    return (
        isinstance(count, ast.Call)
        and method(count) == "len"
        and bool(count.args)
        and plain_name(count.args[0]) == plain_name(source) != ""
    )


def _is_batch_mean(facts: Facts, module: Module, value: ast.expr) -> bool:
    """Return whether a value is the mean loss of a batch: a criterion's result, not multiplied by anything."""
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and method(value) in ("item", "detach", "cpu")
    ):
        value = value.func.value
    if isinstance(value, ast.Name):
        origins = [o.node for o in facts.project.origins(module, value) if isinstance(o.node, ast.expr)]
    else:
        origins = [value]
    if len(origins) != 1 or not isinstance(origins[0], ast.Call):
        return False
    call = origins[0]
    name = method(call)
    if keyword(call, "reduction") is not None:
        return constant(keyword(call, "reduction")) == "mean"
    if name in (
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "l1_loss",
        "smooth_l1_loss",
    ):
        return True
    if name not in ("criterion", "loss_fn", "loss_func", "loss_function", "criterion_"):
        return False
    made = [c for _, c, _ in facts.project.calls_behind(module, call.func)]
    return all(keyword(c, "reduction") is None and keyword(c, "size_average") is None for c in made)


def _averages(facts: Facts, module: Module, call: ast.Call, leaf: str, value: ast.expr) -> bool:
    operation = keyword(call, "op") or (call.args[1] if len(call.args) > 1 and leaf != "gather" else None)
    if operation is not None and words(operation) & {"AVG", "Average"}:
        return True
    if leaf in ("allreduce", "allreduce_") and (facts.horovod and operation is None):
        average = keyword(call, "average")
        return constant(average) is not False
    if keyword(call, "reduction") is not None:
        return constant(keyword(call, "reduction")) == "mean"
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if leaf == "all_reduce" and owner is not None and last(plain_name(owner)) == "fabric":
        return keyword(call, "reduce_op") is None or constant(keyword(call, "reduce_op")) == "mean"
    if leaf in ("gather", "all_gather", "gather_for_metrics"):
        above = module.parents.get(call)
        if isinstance(above, ast.Attribute) and above.attr == "mean":
            return True
    if leaf == "all_gather_object" and call.args:
        lists = plain_name(call.args[0])
        return any(
            isinstance(item, ast.Call) and method(item) in ("sum", "mean", "fmean") and lists and _mentions(item, lists)
            for item in below(module.scope_of(call), into_functions=False)
        )
    # all_reduce(x) followed by a division of x by the number of ranks
    name = plain_name(value)
    scope = module.scope_of(call)
    for item in below(scope, into_functions=False):
        if (
            isinstance(item, ast.AugAssign)
            and isinstance(item.op, ast.Div)
            and plain_name(item.target) == name != ""
            and _is_ranks(facts, module, item.value)
        ):
            return True
        if (
            isinstance(item, ast.BinOp)
            and isinstance(item.op, ast.Div)
            and name
            and _mentions(item.left, name)
            and _is_ranks(facts, module, item.right)
        ):
            return True
    return False


def _mentions(node: ast.AST, name: str) -> bool:
    return any(plain_name(item) == name for item in subtree(node))


def _is_ranks(facts: Facts, module: Module, node: ast.expr) -> bool:
    named = {word.lower() for word in words(node)}
    if named & {
        "world_size",
        "get_world_size",
        "num_processes",
        "num_replicas",
        "nprocs",
        "ngpus",
        "n_gpus",
        "size",
        "num_gpus",
    }:
        return not named & {"batch_size"}
    return False


def _local_mean(facts: Facts, module: Module, node: ast.expr, depth: int = 0) -> str | None:
    """Return the text of the local mean that a value is made of."""
    if depth > 4:
        return None
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and _is_count(node.right)
        and not _is_ranks(facts, module, node.right)
    ):
        return _short(module, node)
    if isinstance(node, ast.Attribute) and node.attr in ("avg", "global_avg", "average"):
        return _short(module, node)
    if isinstance(node, ast.Call):
        if method(node) in (
            "tensor",
            "as_tensor",
            "FloatTensor",
            "float",
            "Tensor",
            "to",
            *MOVES,
            "detach",
            "clone",
            "stack",
            "item",
        ):
            inner = [*node.args[:1], *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
            for item in inner:
                if (found := _local_mean(facts, module, item, depth + 1)) is not None:
                    return found
            return None
        if method(node) in ("mean", "nanmean", "fmean"):
            named = {word for item in subtree(node) for word in words(item)}
            is_list = any(word.endswith(("es", "s", "list")) and _is_metric(word) for word in named)
            return _short(module, node) if is_list else None
        for origin in facts.project.origins(module, node):
            if (
                origin.node is not node
                and isinstance(origin.node, ast.expr)
                and not isinstance(origin.node, ast.Constant)
            ) and (found := _local_mean(facts, origin.module, origin.node, depth + 2)) is not None:
                return found
        return None
    if isinstance(node, ast.List | ast.Tuple):
        return next((f for item in node.elts if (f := _local_mean(facts, module, item, depth + 1))), None)
    if isinstance(node, ast.Name):
        scope = module.scope_of(node)
        for below_it in below(scope, into_functions=False):
            if (
                isinstance(below_it, ast.AugAssign)
                and isinstance(below_it.op, ast.Div)
                and plain_name(below_it.target) == node.id
                and _is_count(below_it.value)
                and below_it.lineno < node.lineno
                and not _is_ranks(facts, module, below_it.value)
            ):
                return _short(module, below_it)
        for origin in facts.project.origins(module, node):
            if (
                origin.node is not node
                and isinstance(origin.node, ast.BinOp | ast.Call | ast.Attribute)
                and (found := _local_mean(facts, origin.module, origin.node, depth + 1)) is not None
            ):
                return found
    return None


def _is_count(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and method(node) == "len":
        return True
    if isinstance(node, ast.Call) and method(node) in ("max", "float", "int") and node.args:
        return any(_is_count(arg) for arg in node.args)
    if isinstance(node, ast.BinOp):
        return _is_count(node.left) or _is_count(node.right)
    name = last(plain_name(node)).lower()
    return name in (
        "total",
        "count",
        "n",
        "num_samples",
        "num_batches",
        "num_examples",
        "n_samples",
        "n_batches",
        "seen",
        "steps",
        "cnt",
    )


def _is_weighted(facts: Facts, module: Module, call: ast.Call) -> bool:
    """Return whether a count is reduced in the same function too: then sums are what is reduced."""
    for item in below(module.scope_of(call), into_functions=False):
        if isinstance(item, ast.Call) and item is not call and facts.collective(module, item) in REDUCING:
            value = item.args[0] if item.args else None
            if value is not None and any(
                w in " ".join(words(value)).lower() for w in ("count", "total", "num", "size")
            ):
                return True
    return False


def _short(module: Module, node: ast.expr | ast.stmt) -> str:
    text = " ".join(module.source.segment(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- not reduced


def not_reduced(facts: Facts) -> Iterator[Report]:
    """Find results of a rank's share that are reported as those of all samples."""
    if facts.lightning and not facts.has_group:
        yield from _logged_alone(facts)
        return
    if not (facts.has_group or facts.accelerate or facts.fabric) or facts.deepspeed:
        return
    done: set[ast.AST] = set()
    for module, loop, source in facts.iterations:
        scope = module.scope_of(loop)
        is_evaluation = facts.is_evaluation(module, loop)
        is_step = any(other is loop for _, other in facts.step_loops)
        if scope in done or not (is_evaluation or is_step) or not facts.ranks.runs_on_ranks(module, loop):
            continue
        if facts.ranks.reached_by(module, loop) is not None or facts.ranks.is_without_ranks(module, loop):
            continue
        if not _is_sharded(facts, module, source) or _reduces_around(facts, module, loop):
            continue
        place = _result_of(facts, module, loop, scope, is_evaluation)
        if place is None:
            continue
        done.add(scope)
        node, name = place
        kind = "evaluation" if is_evaluation else "training"
        yield Report(
            module=module,
            node=node,
            what=f"`{name}` is of this rank's share of the {kind} data alone, and is reported as that of all: no "
            f"rank adds up what the others found",
            cure="Sum over the ranks first: all_reduce (SUM) the sum and the number of samples (Accelerate: "
            "gather_for_metrics), then divide.",
        )


def _logged_alone(facts: Facts) -> Iterator[Report]:
    many = any(
        last(name) == "Trainer" and _has_many(call) for _, call, name in facts.calls()
    )  # fmt: skip
    if not many:
        return
    for module, call, _ in facts.calls():
        scope = module.scope_of(call)
        if not isinstance(scope, FUNCTIONS) or scope.name not in (
            "validation_step",
            "test_step",
            "on_validation_epoch_end",
        ):
            continue
        if plain_name(call.func) not in ("self.log", "self.log_dict") or not call.args:
            continue
        if keyword(call, "sync_dist") is None and not any(item.arg is None for item in call.keywords):
            value = call.args[1] if len(call.args) > 1 else None
            named = words(value) if value is not None else set()
            if any("metric" in word or word.startswith(("acc", "self")) for word in named):
                continue  # a torchmetrics object is reduced by itself
            yield Report(
                module=module,
                node=call,
                what="the logged value is that of rank 0's share of the data: without sync_dist=True nothing "
                "averages it",
                cure="Add `sync_dist=True`, or log a torchmetrics object, which weighs by samples.",
            )


def _has_many(call: ast.Call) -> bool:
    devices = keyword(call, "devices") or keyword(call, "gpus")
    value = constant(devices)
    strategy = constant(keyword(call, "strategy"))
    many = (isinstance(value, int) and not isinstance(value, bool) and value > 1) or value == -1
    return many or (isinstance(strategy, str) and strategy.startswith(("ddp", "fsdp", "deepspeed")))


def _is_sharded(facts: Facts, module: Module, source: ast.expr) -> bool:
    """Return whether a loop is over a loader of this rank's share of the data."""
    for other, call, name in facts.project.calls_behind(module, source):
        if facts.accelerate and last(name) in ("prepare", "prepare_data_loader"):
            return True
        if facts.fabric and last(name) in ("setup_dataloaders",):
            return True
        for loader in facts.loaders:
            if (
                loader.call is call
                and loader.sampler is not None
                and any(n == "DistributedSampler" for _, _, n in facts.samplers_behind(other, loader.sampler))
            ):
                return True
    return False


def _reduces_around(facts: Facts, module: Module, loop: ast.AST) -> bool:
    """Return whether anything is reduced in the function of a loop, in what it calls, or in its callers after it."""
    scope: ast.AST = module.scope_of(loop)
    for _ in range(3):
        for other, part in facts.project.with_called(module, scope):
            for item in subtree(part):
                if (
                    isinstance(item, ast.Call)
                    and _is_reduction(facts, other, item)
                    and not facts.has_backward(other, module.statement_of(item) if other is module else item)
                ):
                    return True
        sites = facts.project.sites.get(scope, []) if isinstance(scope, FUNCTIONS) else []
        if not sites:
            return False
        module, scope = sites[0].module, sites[0].module.scope_of(sites[0].call)
    return False


def _result_of(
    facts: Facts, module: Module, loop: ast.AST, scope: ast.AST, is_evaluation: bool
) -> tuple[ast.AST, str] | None:
    """Return where a result that the loop adds up leaves the function: printed, logged or returned."""
    added: set[str] = set()
    for item in below(loop):
        if isinstance(item, ast.AugAssign) and isinstance(item.op, ast.Add):
            target = item.target.value if isinstance(item.target, ast.Subscript) else item.target
            added.add(plain_name(target))
        elif isinstance(item, ast.Call) and method(item) in ("append", "update", "extend", "add_batch", "add"):
            owner = plain_name(item.func.value) if isinstance(item.func, ast.Attribute) else ""
            added.add(owner)
    added = {name for name in added if name and _is_metric(name)}
    if not added:
        return None
    # names computed from those
    for _ in range(3):
        for item in below(scope, into_functions=False):
            if isinstance(item, ast.Assign) and any(_mentions(item.value, name) for name in added):
                added |= {plain_name(target) for target in item.targets if _is_metric(plain_name(target))} - {""}
    end = getattr(loop, "end_lineno", 0) or 0
    for item in below(scope, into_functions=False):
        if getattr(item, "lineno", 0) <= end:
            continue
        value: ast.AST | None = None
        if isinstance(item, ast.Return) and item.value is not None and is_evaluation:
            value = item.value
        elif isinstance(item, ast.Call) and _reports(item):
            value = item
        if value is not None:
            name = next((plain_name(n) for n in subtree(value) if plain_name(n) in added), None)
            if name is not None:
                return item, name
    return None


def _reports(call: ast.Call) -> bool:
    return method(call) in (
        "print",
        "info",
        "log",
        "add_scalar",
        "write",
        "display",
        "print_summary",
        "rank0_print",
        "log_metrics",
    )


def is_loader(facts: Facts, module: Module, source: ast.expr) -> bool:
    if "loader" in plain_name(source).lower():
        return True
    return any(
        any(item.call is call for item in facts.loaders) for _, call, _ in facts.project.calls_behind(module, source)
    )
