"""Rules on training steps: reads of the device, accumulation, clipping."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts, exclusive, is_backward
from dure.scripts.lint.finding import Edit, Report, inserted_before, replaced
from dure.scripts.lint.modules import (
    FUNCTIONS,
    LOOPS,
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
from dure.scripts.lint.ranks import Guard


def read_each_step(facts: Facts) -> Iterator[Report]:
    """Find `.item()` in each pass of a step loop."""
    if not facts.on_accelerators and not facts.wraps:
        return
    for module, loop in facts.step_loops:
        if not facts.has_ranks and not facts.wraps:
            return
        found = [
            (other, call)
            for other, call in _calls_each_step(facts, module, loop)
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "item"
            and not call.args
            and _is_of_device(call)
        ]
        if not found:
            continue
        other, call = found[0]
        more = f" (and {len(found) - 1} more in this loop)" if len(found) > 1 else ""
        assert isinstance(call.func, ast.Attribute)
        edits: tuple[Edit, ...] = ()
        above = other.parents.get(call)
        if isinstance(above, ast.AugAssign) and above.value is call:
            edits = (replaced(other, call, f"{other.source.segment(call.func.value)}.detach()"),)
        yield Report(
            module=other,
            node=call,
            what=f"`.item()` in each step{more} waits until the device has computed everything so far: Python cannot "
            f"run ahead, and the device idles "
            "between steps",
            cure="Add up detached tensors on the device, and read the sum every N steps or at the end of the epoch.",
            edits=edits,
        )


def _is_of_device(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    text = {w.lower() for w in words(call.func.value)}
    return not text & {"np", "numpy", "lr", "get_last_lr", "time", "seq_len", "shape", "len", "scaler", "temperature"}


def _calls_each_step(facts: Facts, module: Module, loop: ast.AST) -> Iterator[tuple[Module, ast.Call]]:
    """Yield the calls of each pass of a loop that no `if` and no further loop is around, also in functions it calls."""
    pending: list[tuple[Module, ast.AST, ast.AST, int]] = [
        (module, item, loop, 0) for item in getattr(loop, "body", [])
    ]
    seen: set[ast.AST] = set()
    while pending:
        other, top, end, depth = pending.pop(0)
        for item in below(top, into_functions=False):
            if not isinstance(item, ast.Call) or not _is_each_time(facts, other, item, end):
                continue
            yield other, item
            for third, function, _ in facts.project.targets.get(item, ()) if depth < 2 else ():
                if (
                    function not in seen
                    and function.name != "__init__"
                    and not facts.is_evaluating_function(third, function)
                ):
                    seen.add(function)
                    pending += [(third, statement, function, depth + 1) for statement in function.body]


def _is_each_time(facts: Facts, module: Module, node: ast.AST, end: ast.AST) -> bool:
    under = node
    for above in module.within(node):
        if above is end:
            return not _is_after_exit(module, under)
        if isinstance(above, ast.If):
            in_test = under is above.test
            if not in_test and not _is_configuration(above.test):
                return False
        if isinstance(above, ast.IfExp | ast.ExceptHandler | LOOPS[0] | LOOPS[2]) and under is not getattr(
            above, "iter", None
        ):
            return False
        under = above
    return isinstance(end, FUNCTIONS) or end in set(module.above(node))


def _is_configuration(test: ast.expr) -> bool:
    """Return whether a test is of a setting, which is the same in each step."""
    named = {w.lower() for w in words(test)}
    return (
        bool(named)
        and isinstance(test, ast.Attribute | ast.Name | ast.UnaryOp)
        and bool(named & {"amp", "use_amp", "fp16", "args", "scaler", "use_fp16", "mixed_precision"})
    )


def _is_after_exit(module: Module, statement: ast.AST) -> bool:
    for earlier in module.block_of(statement):
        if earlier is statement:
            return False
        if isinstance(earlier, ast.If) and any(isinstance(i, ast.Continue) for i in subtree(earlier)):
            return True
    return False


# --- accumulation


SYNCING = {
    "no_sync", "require_backward_grad_sync", "no_backward_sync", "set_requires_gradient_sync", "set_is_last_backward",
    "set_requires_all_reduce", "delay_allreduce",
}  # fmt: skip
"""Names in scripts that decide themselves which backward averages."""


def accumulated_with_sync(facts: Facts) -> Iterator[Report]:
    """Find gradient accumulation in which DDP averages the gradients of each microbatch."""
    if not any(wrap.kind in ("ddp", "fsdp") for wrap in facts.wraps) and not facts.accelerate and not facts.fabric:
        return
    if facts.deepspeed:
        return
    if facts.names & {"no_sync", "accumulate", "no_backward_sync", "maybe_no_sync"} or facts.words & SYNCING:
        return
    for module, loop in facts.step_loops:
        kind = _accumulates(facts, module, loop)
        if kind is None:
            continue
        cure = (
            "Use `with accelerator.accumulate(model):`, with `Accelerator(gradient_accumulation_steps=…)`."
            if facts.accelerate
            else "Use `with fabric.no_backward_sync(model, enabled=is_accumulating):` around forward and backward."
            if facts.fabric
            else "Run forward and backward of all microbatches but the last under `with model.no_sync():`."
        )
        yield Report(
            module=module,
            node=kind,
            what="each microbatch's backward averages the gradients over the ranks, although only the last one of a "
            "step has to: the "
            "communication of a step is paid as often as it accumulates",
            cure=cure,
        )


def _accumulates(facts: Facts, module: Module, loop: ast.AST) -> ast.AST | None:
    """Return the backward of a loop that steps the optimiser only every few passes."""
    body = ast.Module(body=[*getattr(loop, "body", [])], type_ignores=[])
    calls = [
        (m, c)
        for m, part in facts.project.with_called(module, body, depth=2)
        for c in subtree(part)
        if isinstance(c, ast.Call)
    ]
    backward = next((c for _, c in calls if is_backward(c)), None)
    steps = [(m, c) for m, c in calls if _is_optimizer_step(c)]
    if backward is None:
        return None
    if steps:
        guarded = [
            guard
            for m, c in steps
            for guard in [g for g in facts.ranks.guards(m, c) if _is_every_few(facts, m, g)]
        ]  # fmt: skip
        return backward if guarded and len(guarded) >= len(steps) else None
    # a loop over microbatches, and the step after it in the loop around it
    outer = module.loops_of(loop)
    if not outer or not isinstance(loop, ast.For):
        return None
    after = [
        item
        for statement in outer[0].body  # type: ignore[attr-defined]
        for item in subtree(statement)
        if isinstance(item, ast.Call) and _is_optimizer_step(item) and item.lineno > (loop.end_lineno or 0)
    ]
    is_count = isinstance(loop.iter, ast.Call) and method(loop.iter) == "range"
    named = " ".join(words(loop.iter) | words(loop.target)).lower()
    is_micro = any(word in named for word in ("micro", "accum", "chunk", "split"))
    return backward if after and (is_micro or (is_count and "accum" in named)) else None


def _is_optimizer_step(call: ast.Call) -> bool:
    if method(call) != "step" or not isinstance(call.func, ast.Attribute):
        return False
    owner = last(plain_name(call.func.value)).lower()
    return "opt" in owner or owner in ("scaler", "grad_scaler", "sgd", "adam") or "scaler" in owner


def _is_every_few(facts: Facts, module: Module, guard: Guard) -> bool:
    """Return whether a test is true in every n-th pass."""
    numbers = [i.right for i in subtree(guard.test) if isinstance(i, ast.BinOp) and isinstance(i.op, ast.Mod)]
    for number in numbers:
        origins = facts.project.origins(module, number)
        constants = {constant(o.node) for o in origins if isinstance(o.node, ast.Constant)}
        if constants == {1}:
            return False  # every pass, where the rest is of a library that accumulates by itself
    for item in subtree(guard.test):
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Mod):
            return True
        name = last(plain_name(item)).lower()
        if name and ("accum" in name or name in ("is_update_step", "do_step", "should_step", "update_grad")):
            return True
    return _is_counter(module, guard)


def _is_counter(module: Module, guard: Guard) -> bool:
    """Return whether a test compares a count of passes that the guarded block sets back."""
    test = guard.test
    name = plain_name(test.left) if isinstance(test, ast.Compare) else ""
    block = module.parents.get(test)
    if not name or not isinstance(block, ast.If):
        return False
    around = module.loops_of(block)
    counts = any(
        isinstance(item, ast.AugAssign) and plain_name(item.target) == name for loop in around for item in subtree(loop)
    )
    is_set_back = any(
        isinstance(item, ast.Assign) and constant(item.value) == 0 and name in map(plain_name, item.targets)
        for statement in block.body
        for item in subtree(statement)
    )
    return counts and is_set_back


# --- clipping


def _is_scaler(facts: Facts, module: Module, node: ast.expr) -> bool:
    """Return whether a value is a GradScaler, by its name or by what it is made of."""
    return "scaler" in plain_name(node).lower() or any(
        "GradScaler" in last(name) for _, _, name in facts.project.calls_behind(module, node)
    )


def clipped_before_unscaled(facts: Facts) -> Iterator[Report]:
    """Find clipping of gradients that a scaler has multiplied."""
    for module, call, name in facts.reported_calls:
        if last(name) not in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
            continue
        scope = module.scope_of(call)
        calls = [item for item in below(scope) if isinstance(item, ast.Call)]
        scaled = [
            item
            for item in calls
            if method(item) == "scale"
            and isinstance(item.func, ast.Attribute)
            and _is_scaler(facts, module, item.func.value)
        ]
        scaled = [item for item in scaled if item.lineno < call.lineno and not _are_apart(facts, module, item, call)]
        if not scaled or any(method(item) == "unscale_" and _is_before(item, call) for item in calls):
            continue
        if "unscale_" in {
            method(c)
            for m, f in facts.project.called_functions(scope, depth=2)
            for c in subtree(f)
            if isinstance(c, ast.Call)
        }:
            continue
        owner = scaled[-1].func
        assert isinstance(owner, ast.Attribute)
        scaler = module.source.segment(owner.value)
        step = next(
            (item for item in calls if method(item) == "step" and item.args and isinstance(item.func, ast.Attribute)
             and module.source.segment(item.func.value) == scaler), None)  # fmt: skip
        edits: tuple[Edit, ...] = ()
        if step is not None and plain_name(step.args[0]):
            edits = inserted_before(
                module, module.statement_of(call), [f"{scaler}.unscale_({module.source.segment(step.args[0])})"]
            )
        if step is None and keyword(call, "optimizer") is not None:
            continue
        yield Report(
            module=module,
            node=call,
            what="the gradients are still multiplied by the scaler's factor, some thousands: the limit clips nearly "
            "all of them, to a norm that "
            "shrinks with the factor",
            cure=f"Call `{scaler}.unscale_(optimizer)` before clipping.",
            edits=edits,
            is_safe=bool(edits),
        )


def _is_before(item: ast.Call, call: ast.Call) -> bool:
    return item.lineno <= call.lineno


def _are_apart(facts: Facts, module: Module, one: ast.Call, other: ast.Call) -> bool:
    if exclusive(module, one, other):
        return True
    tests = {ast.dump(g.test): g.is_true for g in facts.ranks.guards(module, one)}
    return any(tests.get(ast.dump(g.test), g.is_true) != g.is_true for g in facts.ranks.guards(module, other))
