"""Rules on wrapping models: order, nesting, options."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts, Wrap, exclusive
from dure.scripts.lint.finding import Edit, Report, replaced
from dure.scripts.lint.modules import (
    FUNCTIONS,
    MOVES,
    Module,
    argument,
    below,
    constant,
    keyword,
    method,
    plain_name,
    subtree,
    words,
)
from dure.scripts.lint.rules.optimizers import makers

NAMES = {"ddp": "DistributedDataParallel", "fsdp": "FSDP", "dp": "DataParallel"}


def wrapped_before_moved(facts: Facts) -> Iterator[Report]:
    """Find models that DDP wraps before they are on their device."""
    for wrap in facts.wraps:
        if wrap.kind != "ddp" or wrap.model is None:
            continue
        module, call = wrap.module, wrap.call
        above = module.parents.get(call)
        move: ast.Call | None = None
        if isinstance(above, ast.Attribute) and above.attr in MOVES:
            parent = module.parents.get(above)
            if isinstance(parent, ast.Call) and _is_move(facts, module, parent):
                move = parent
        if move is None:
            move = _moved_later(facts, wrap)
        if move is None or (_is_moved(wrap) and module.parents.get(call) is not move.func):
            continue
        edits: tuple[Edit, ...] = ()
        if isinstance(above, ast.Attribute) and module.parents.get(above) is move:
            end = module.source.span(call)[1]
            moved = module.source.text[end : module.source.span(move)[1]]
            start, stop = module.source.span(wrap.model)
            edits = (
                Edit(end, module.source.span(move)[1], ""),
                Edit(start, stop, module.source.text[start:stop] + moved),
            )
        yield Report(
            module=module,
            node=call,
            what="DDP wraps the model where it is, mostly the CPU: it refuses GPU `device_ids`, or makes its buckets "
            "and broadcasts the "
            "weights there, before the move puts the parameters elsewhere",
            cure="Move the model to its device first, then wrap it: `model = DDP(model.to(device), "
            "device_ids=[local_rank])`.",
            edits=edits,
            is_safe=bool(edits),
        )


def _is_move(facts: Facts, module: Module, call: ast.Call) -> bool:
    if method(call) in MOVES - {"to"}:
        return True
    named = {w.lower() for arg in call.args for w in words(arg)} | {str(constant(arg)) for arg in call.args}
    return bool(call.args or keyword(call, "device")) and not named & {
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "half",
        "dtype",
    }


def _is_moved(wrap: Wrap) -> bool:
    """Return whether the model was moved before it is wrapped, as far as its function shows."""
    module, call = wrap.module, wrap.call
    assert wrap.model is not None
    name = plain_name(wrap.model)
    text = [item for item in subtree(wrap.model) if isinstance(item, ast.Call)]
    if any(method(item) in MOVES for item in text):
        return True
    for item in below(module.scope_of(call), into_functions=False):
        if isinstance(item, ast.Call) and method(item) in MOVES and isinstance(item.func, ast.Attribute):
            if item.lineno < call.lineno and name and name in {plain_name(n) for n in subtree(item.func.value)}:
                return True
            target = next(iter(getattr(module.statement_of(item), "targets", [])), None)
            if item.lineno < call.lineno and target is not None and plain_name(target) == name:
                return True
    return False


def _moved_later(facts: Facts, wrap: Wrap) -> ast.Call | None:
    module, call = wrap.module, wrap.call
    statement = module.statement_of(call)
    target = next(iter(getattr(statement, "targets", [])), None)
    name = plain_name(target) if target is not None else ""
    if not name:
        return None
    for item in below(module.scope_of(call), into_functions=False):
        if isinstance(item, ast.Call) and method(item) in MOVES and isinstance(item.func, ast.Attribute):
            is_it = plain_name(item.func.value) == name and item.lineno > statement.lineno
            if is_it and not exclusive(module, item, call) and _is_move(facts, module, item):
                return item
    return None


def wrapped_after_optimizer(facts: Facts) -> Iterator[Report]:
    """Find wraps that come after the optimiser was built from the bare model."""
    for wrap in facts.wraps:
        if wrap.kind == "dp" or wrap.model is None:
            continue
        module, call = wrap.module, wrap.call
        name = plain_name(wrap.model)
        built = _built_before(facts, wrap, name) or _given_with_model(facts, wrap)
        if built is None:
            continue
        if wrap.kind == "fsdp":
            what = (
                "FSDP replaces the parameters by shards, and the optimiser was built before, from the whole ones: it "
                "steps tensors "
                "that the model no longer has"
            )
        elif facts.ranks.is_single(module, call):
            continue
        elif _is_moved_between(wrap, name, built):
            what = (
                "the optimiser was built before the model was moved and wrapped: torch asks to move first, because "
                "state that an optimiser already has, and parameters that a move replaces, stay on the old device"
            )
        elif _is_straight_on(wrap, built):
            what = (
                "the optimiser was built from the bare model: DDP keeps its parameters, but with FSDP, or a conversion "
                "in between, it would step tensors that the model no longer has"
            )
        else:
            continue
        yield Report(
            module=module,
            node=call,
            what=what,
            cure="Move the model, then wrap it, and only then build the optimiser, from the wrapped model's "
            "parameters.",
        )


def _built_before(facts: Facts, wrap: Wrap, name: str) -> ast.Call | None:
    if not name:
        return None
    module = wrap.module
    own = [
        call
        for other, call in facts.optimizers
        if other is module and module.scope_of(call) is module.scope_of(wrap.call) and _has_parameters_of(call, name)
    ]
    before = [call for call in own if call.lineno < wrap.call.lineno and not exclusive(module, call, wrap.call)]
    return before[-1] if before and len(before) == len(own) else None


def _has_parameters_of(call: ast.Call, name: str) -> bool:
    given = argument(call, "params", 0)
    return given is not None and any(
        isinstance(item, ast.Call)
        and method(item) in ("parameters", "named_parameters")
        and isinstance(item.func, ast.Attribute)
        and plain_name(item.func.value) == name
        for item in subtree(given)
    )


def _given_with_model(facts: Facts, wrap: Wrap) -> ast.Call | None:
    """Return the optimiser that a function is given together with the model that it wraps."""
    module = wrap.module
    scope = module.scope_of(wrap.call)
    if not isinstance(scope, FUNCTIONS) or wrap.model is None:
        return None
    parameters = [a.arg for a in (*scope.args.args, *scope.args.kwonlyargs)]
    name = plain_name(wrap.model)
    if name.startswith("self."):  # self.model = model.to(device)
        values = [a.value for a in module.attributes.get(name, []) if module.scope_of(a.statement) is scope]
        values = [v for v in values if v is not wrap.call]
        named = {plain_name(n) for v in values for n in subtree(v)} & set(parameters)
        name = next(iter(named), "")
    if name not in parameters:
        return None
    for parameter in parameters:
        if "opt" in parameter.lower():
            node = next((n for n in subtree(scope) if isinstance(n, ast.Name) and n.id == parameter), None)
            for origin in facts.project.origins(module, node) if node is not None else ():
                call = next((c for _, c in facts.optimizers if c is origin.node), None)
                if call is not None:
                    return call
    return None


def _is_moved_between(wrap: Wrap, name: str, built: ast.Call) -> bool:
    """Return whether the model is moved between its optimiser and its wrap."""
    module = wrap.module
    assert wrap.model is not None
    is_elsewhere = _is_elsewhere(wrap, built)
    moves = [
        item
        for item in [*subtree(wrap.model), *below(module.scope_of(wrap.call), into_functions=False)]
        if isinstance(item, ast.Call) and method(item) in MOVES and isinstance(item.func, ast.Attribute)
    ]
    return any(_is_moved_by(wrap, item, name) and (is_elsewhere or item.lineno > built.lineno) for item in moves)


def _is_moved_by(wrap: Wrap, move: ast.Call, name: str) -> bool:
    assert wrap.model is not None
    assert isinstance(move.func, ast.Attribute)
    is_inside = any(item is move for item in subtree(wrap.model))
    target = next(iter(getattr(wrap.module.statement_of(move), "targets", [])), None)
    named = {plain_name(move.func.value), plain_name(target) if target is not None else ""}
    return is_inside or (move.lineno <= wrap.call.lineno and name in named)


def _is_elsewhere(wrap: Wrap, built: ast.Call) -> bool:
    module = wrap.module
    return built not in module.parents or module.scope_of(built) is not module.scope_of(wrap.call)


def _is_straight_on(wrap: Wrap, built: ast.Call) -> bool:
    """Return whether optimiser and wrap follow each other in one block, with no branch for one process."""
    module = wrap.module
    block = module.block_of(module.statement_of(wrap.call))
    return not _is_elsewhere(wrap, built) and module.block_of(module.statement_of(built)) is block


def data_parallel(facts: Facts) -> Iterator[Report]:
    """Find DataParallel in scripts that have nothing else for several devices."""
    if facts.has_ranks or not facts.step_loops:
        return
    for wrap in facts.wraps:
        if wrap.kind != "dp":
            continue
        yield Report(
            module=wrap.module,
            node=wrap.call,
            what="DataParallel copies the model to every device in every step, and drives all devices from one "
            "Python process; outputs and "
            "loss gather on the first device, which is the slowest and the first to run out of memory",
            cure="Use DistributedDataParallel with one process per device, started by `dure run --nproc N` or "
            "torchrun, also on one host.",
        )


def wrapped_twice(facts: Facts) -> Iterator[Report]:
    """Find DataParallel around DDP, and DDP around DataParallel."""
    for wrap in facts.wraps:
        if wrap.model is None or wrap.kind == "fsdp":
            continue
        wanted = "ddp" if wrap.kind == "dp" else "dp"
        inner = facts.wrap_behind(wrap.module, wrap.model, wanted)
        if inner is None or inner.call is wrap.call:
            continue
        if inner.module is wrap.module and _are_alternatives(facts, wrap, inner):
            continue
        yield Report(
            module=wrap.module,
            node=wrap.call,
            what=f"{NAMES[wrap.kind]} wraps a model that {NAMES[inner.kind]} wraps already: the one copies replicas "
                 f"between devices in each "
            "forward, whose gradients the other does not average, or averages twice",
            cure="Use DistributedDataParallel alone, with one process per device.",
            edits=(replaced(wrap.module, wrap.call, wrap.module.source.segment(wrap.model)),)
            if wrap.kind == "dp" and wrap.module.source.segment(wrap.model) else (),
        )  # fmt: skip


def _are_alternatives(facts: Facts, wrap: Wrap, inner: Wrap) -> bool:
    if exclusive(wrap.module, wrap.call, inner.call):
        return True
    # `if distributed: DDP(...)`, later `if not distributed: DataParallel(...)`
    one = [(g.test, g.is_true) for g in facts.ranks.guards(wrap.module, wrap.call)]
    two = [(g.test, g.is_true) for g in facts.ranks.guards(inner.module, inner.call)]
    for test, truth in one:
        for other, other_truth in two:
            first, second = facts.ranks.means_ranks(wrap.module, test), facts.ranks.means_ranks(inner.module, other)
            if ast.dump(test) == ast.dump(other) and truth != other_truth:
                return True
            if first is not None and second is not None and (first == truth) != (second == other_truth):
                return True
    return bool(one) and bool(two)


def unused_for_nothing(facts: Facts) -> Iterator[Report]:
    """Find `find_unused_parameters=True` for models that use all of their parameters in each forward."""
    for wrap in facts.wraps:
        value = keyword(wrap.call, "find_unused_parameters")
        if wrap.kind != "ddp" or constant(value) is not True or wrap.model is None or value is None:
            continue
        made_by = makers(facts, wrap.module, wrap.model)
        if not made_by or facts.words & {"requires_grad", "requires_grad_"}:
            continue
        if not all(_uses_all(facts, maker) for maker in made_by):
            continue
        item = next(k for k in wrap.call.keywords if k.arg == "find_unused_parameters")
        yield Report(
            module=wrap.module,
            node=wrap.call,
            what="the model's forward uses all of its layers each time, so there is nothing to find: DDP walks "
            "through the whole graph "
            "after each forward for it, and starts its all-reduces later",
            cure="Leave `find_unused_parameters` out.",
            edits=_without(wrap.module, wrap.call, item),
        )


def _without(module: Module, call: ast.Call, item: ast.keyword) -> tuple[Edit, ...]:
    source = module.source
    start, end = source.offset(item.lineno, item.col_offset), source.span(item.value)[1]
    before = source.text[:start].rstrip()
    if before.endswith(","):
        return (Edit(len(before) - 1, end, ""),)
    return ()


def _uses_all(facts: Facts, maker: ast.AST) -> bool:
    """Return whether a model's forward is straight and names each layer that its constructor makes."""
    module = next((m for m in facts.project.modules if maker in m.parents), None)
    if module is None or not isinstance(maker, ast.Call):
        return False
    if module.called(maker) in ("torch.nn.Sequential", "torch.nn.Linear"):
        return True
    if module.called(maker).startswith("torchvision.models.resnet"):
        return True
    found = facts.project.definition(module, maker.func)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return False
    cls = found[1]
    methods = {item.name: item for item in cls.body if isinstance(item, FUNCTIONS)}
    if "forward" not in methods or "__init__" not in methods:
        return False
    if any(
        isinstance(item, ast.If | ast.IfExp | ast.While | ast.Try | ast.Match) for item in subtree(methods["forward"])
    ):
        return False
    layers = {
        target.attr
        for item in subtree(methods["__init__"])
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)
        for target in item.targets
        if isinstance(target, ast.Attribute) and plain_name(target.value) == "self"
    }
    if any(isinstance(item, ast.If) for item in subtree(methods["__init__"])):
        return False
    used = {item.attr for item in subtree(methods["forward"]) if isinstance(item, ast.Attribute)}
    return bool(layers) and layers <= used
