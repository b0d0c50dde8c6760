"""Rules on which rank trains on which samples."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts, Loader
from dure.scripts.lint.finding import Edit, Report, inserted_before, replaced
from dure.scripts.lint.modules import FUNCTIONS, Module, constant, keyword, last, method, plain_name, words

DIVIDING_WORDS = {
    "split_dataset_by_node", "shard", "IterableDataset", "webdataset", "wds", "WebLoader", "WebDataset",
    "get_worker_info", "DALIClassificationIterator", "DALIGenericIterator", "StatefulDistributedSampler",
    "prepare_data_loader",
    "DistributedBatchSampler", "ParallelAwareDataloader", "DPAwareDataLoader", "split_between_processes",
}  # fmt: skip
"""Names in scripts whose data is divided between ranks in another way than by a sampler."""
LOCAL_SAMPLERS = {"RandomSampler", "SequentialSampler", "WeightedRandomSampler", "SubsetRandomSampler"}


def is_divided_otherwise(facts: Facts, loader: Loader) -> bool:
    if facts.names & DIVIDING_WORDS or facts.words & DIVIDING_WORDS:
        return True
    if loader.data is None:
        return True
    if facts.ranks.depends_on_rank(loader.module, loader.data):
        return True
    for origin in facts.project.origins(loader.module, loader.data):
        node = origin.node
        if isinstance(node, ast.Call):
            given = [*node.args, *(item.value for item in node.keywords)]
            if any(facts.ranks.depends_on_rank(origin.module, arg) or _is_size(arg) for arg in given):
                return True
            found = facts.project.definition(origin.module, node.func)
            if found is not None and isinstance(found[1], ast.ClassDef):
                named = {word.lower() for word in words(found[1])}
                if named & {"rank", "get_rank", "world_size", "get_world_size"} or "__iter__" in _methods(found[1]):
                    return True
            if "iter" in method(node).lower():
                return True
    return False


def _is_size(node: ast.expr) -> bool:
    return bool({word.lower() for word in words(node)} & {"world_size", "get_world_size", "num_replicas"})


def _methods(cls: ast.ClassDef) -> set[str]:
    return {item.name for item in cls.body if isinstance(item, FUNCTIONS)}


def sampler_missing(facts: Facts) -> Iterator[Report]:
    """Find loaders of training data that give every rank all samples."""
    if not facts.divides_itself or facts.deepspeed:
        return
    for loader in facts.loaders:
        module, call = loader.module, loader.call
        if loader.use != "train" or loader.has_unknown or not facts.ranks.runs_on_ranks(module, call):
            continue
        if facts.ranks.is_without_ranks(module, call) or facts.ranks.reached_by(module, call) is not None:
            continue
        if loader.sampler is not None:
            behind = facts.samplers_behind(module, loader.sampler)
            is_local = bool(behind) and all(name in LOCAL_SAMPLERS for _, _, name in behind)
            values = facts.project.origins(module, loader.sampler)
            is_local = is_local and all(isinstance(o.node, ast.Call) or constant(o.node) is None for o in values)
            if not is_local:
                continue
        if is_divided_otherwise(facts, loader):
            continue
        what = (
            "every rank draws its batches from all samples: an epoch sees each sample once per rank, in as many "
            "steps as "
            "on one process, so N ranks are not N times as fast and the samples of a step can repeat"
        )
        data = module.source.segment(loader.data) if loader.data is not None else "dataset"
        cure = (
            f"Give the loader `sampler=DistributedSampler({data})` without `shuffle`, and call its "
            f"`set_epoch(epoch)` at "
            "the start of each epoch."
        )
        edits: tuple[Edit, ...] = ()
        if loader.sampler is None and "\n" not in data and loader.shuffle is not None and keyword(call, "shuffle"):
            item = next(item for item in call.keywords if item.arg == "shuffle")
            name = "torch.utils.data.distributed.DistributedSampler"
            name = next((k for k, v in module.imports.items() if last(v) == "DistributedSampler"), name)
            if "torch" in module.imports or "." not in name:
                edits = (_keyword_edit(module, item, f"sampler={name}({data})"),)
        yield Report(module=module, node=call, what=what, cure=cure, edits=edits)


def _keyword_edit(module: Module, item: ast.keyword, text: str) -> Edit:
    source = module.source
    start = source.offset(item.lineno, item.col_offset)
    first, end = source.span(item.value)
    for _ in range(source.text[start:first].count("(")):  # of which the tree knows nothing
        end = source.text.index(")", end) + 1
    return Edit(start, end, text)


def shuffle_beside_sampler(facts: Facts) -> Iterator[Report]:
    """Find loaders that are given both a sampler and `shuffle=True`."""
    for loader in facts.loaders:
        given = {item.arg for item in loader.call.keywords}
        if constant(loader.shuffle) is not True or loader.sampler is None or loader.shuffle is None:
            continue
        if ("shuffle" not in given and len(loader.call.args) < 3) or not given & {"sampler", "batch_sampler"}:
            continue  # in a dictionary, where `if` may decide
        origins = facts.project.origins(loader.module, loader.sampler)
        if any(constant(o.node) is None for o in origins):  # None on one process, for which it is right
            text = f"{loader.module.source.segment(loader.sampler)} is None"
        else:
            text = "False"
        name = plain_name(loader.sampler)
        can_edit = text == "False" or bool(name)
        yield Report(
            module=loader.module,
            node=loader.call,
            what="torch refuses a loader with both a sampler and shuffle=True: it raises ValueError when it is made",
            cure="Leave `shuffle` out: DistributedSampler shuffles by itself.",
            edits=(replaced(loader.module, loader.shuffle, text),) if can_edit else (),
            is_safe=can_edit,
        )


def epoch_never_set(facts: Facts) -> Iterator[Report]:
    """Find shuffling samplers whose epoch is never set."""
    if facts.lightning or facts.accelerate:
        return
    set_on = [
        (module, call)
        for module, call, name in facts.calls()
        if last(name) == "set_epoch" or method(call) == "set_epoch"
    ]
    for module, call, name in list(facts.calls()):
        if last(name) not in ("DistributedSampler", "ElasticDistributedSampler") or not call.args + call.keywords:
            continue
        if constant(keyword(call, "shuffle")) is False or (len(call.args) > 3 and constant(call.args[3]) is False):
            continue
        loader = next(
            (item for item in facts.loaders if item.sampler is not None and item.use == "train"
             and any(c is call for _, c, _ in facts.samplers_behind(item.module, item.sampler))), None)  # fmt: skip
        if loader is None or _is_set(facts, set_on, call):
            continue
        loop = _epoch_loop(facts)
        if loop is None:
            continue
        if (facts.fabric and loop) or facts.ranks.is_without_ranks(module, call):
            continue
        yield Report(
            module=module,
            node=call,
            what="the sampler shuffles by its epoch, which stays 0: every epoch has the same order and the "
            "same batches",
            cure="Call `set_epoch(epoch)` of the sampler at the start of each epoch.",
            edits=(edits := _set_epoch(facts, module, call, loop)),
            is_safe=bool(edits),
        )


def _is_set(facts: Facts, calls: list[tuple[Module, ast.Call]], sampler: ast.Call) -> bool:
    """Return whether `set_epoch` is called on a sampler, or on something unknown."""
    for module, call in calls:
        if not isinstance(call.func, ast.Attribute):
            return True
        owner = call.func.value
        is_sampler_of = isinstance(owner, ast.Attribute) and owner.attr in ("sampler", "batch_sampler")
        if is_sampler_of and isinstance(owner, ast.Attribute):
            owner = owner.value
        behind = list(facts.project.calls_behind(module, owner))
        samplers = [c for _, c, name in behind if last(name) == "DistributedSampler"]
        loaders = [c for _, c, name in behind if last(name) in ("DataLoader", "MultiEpochsDataLoader")]
        for item in facts.loaders:
            if item.call in loaders and item.sampler is not None:
                samplers += [c for _, c, _ in facts.samplers_behind(item.module, item.sampler)]
        if not samplers or sampler in samplers:
            return True
    return False


def _epoch_loop(facts: Facts) -> tuple[Module, ast.AST] | None:
    """Return a loop around a step loop."""
    for module, step_loop in facts.step_loops:
        outer = module.loops_of(step_loop)
        if outer:
            return module, outer[-1]
        scope = module.scope_of(step_loop)
        for _ in range(4):
            sites = facts.project.sites.get(scope, ()) if isinstance(scope, FUNCTIONS) else ()
            for site in sites:
                loops = site.module.loops_of(site.call)
                if loops:
                    return site.module, loops[-1]
            if not sites:
                break
            scope = sites[0].module.scope_of(sites[0].call)
    return None


def _set_epoch(facts: Facts, module: Module, call: ast.Call, loop: tuple[Module, ast.AST]) -> tuple[Edit, ...]:
    other, node = loop
    statement = module.statement_of(call)
    if other is not module or not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
        return ()
    if not isinstance(statement, ast.Assign) or statement.value is not call or len(statement.targets) != 1:
        return ()
    name = plain_name(statement.targets[0])
    scope, at = module.scope_of(statement), module.scope_of(node)
    is_visible = scope is at or isinstance(scope, ast.Module)
    if name.startswith("self."):
        is_visible = module.class_of(statement) is module.class_of(node)
    if not name or not is_visible or facts.ranks.is_single(module, statement):
        return ()
    if scope is at and not any(item is statement or item in module.block_of(node) for item in [statement]):
        return ()
    if module.block_of(statement) is not module.block_of(node) and not name.startswith("self."):
        return ()
    if not statement.lineno < node.lineno and not name.startswith("self."):
        return ()
    return inserted_before(module, node.body[0], [f"{name}.set_epoch({node.target.id})"])


def peeked(facts: Facts) -> Iterator[Report]:
    """Find iterators of a loader that are made in each epoch for one look at a batch."""
    for module, call, name in facts.reported_calls:
        inner = call.args[0] if name == "next" and call.args else None
        if not (isinstance(inner, ast.Call) and plain_name(inner.func) == "iter" and inner.args):
            continue
        loader = inner.args[0]
        text = plain_name(loader)
        scope = module.scope_of(call)
        is_iterated = any(
            other is module and module.scope_of(loop) is scope and plain_name(source) == text != ""
            and loop not in module.loops_of(call)
            and facts.has_backward(module, loop)
            for other, loop, source in facts.iterations
        )  # fmt: skip
        is_repeated = bool(module.loops_of(call)) or any(
            site.module.loops_of(site.call)
            for site in (facts.project.sites.get(scope, []) if isinstance(scope, FUNCTIONS) else [])
        )
        if not is_iterated or not is_repeated or not any(
            any(item.call is c for item in facts.loaders) for _, c, _ in facts.project.calls_behind(module, loader)
        ):  # fmt: skip
            continue
        yield Report(
            module=module,
            node=call,
            what="each epoch makes a second iterator of the loader for one batch, which is thrown away: its workers "
            "are started, read ahead and "
            "stopped on every rank, and the random numbers move on; before set_epoch it reads the last epoch's order",
            cure="Take what is needed from the loader (`loader.batch_size`) or from the first batch of the loop.",
        )
