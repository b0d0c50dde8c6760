"""Rules on collectives that only some ranks reach, and on steps around DDP."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts
from dure.scripts.lint.finding import Report, replaced
from dure.scripts.lint.modules import FUNCTIONS, Function, Module, below, body_of, method, plain_name, subtree, words
from dure.scripts.lint.ranks import Who, leaves

HANG = "the others never call it, so those that do wait until the timeout of the process group"


def _guarded(facts: Facts, module: Module, call: ast.Call) -> Who | None:
    found = facts.ranks.local_guard(module, call)
    return None if found is None else found[0]


def _has_counterpart(facts: Facts, module: Module, call: ast.Call, who: Who) -> bool:
    """Return whether the ranks that do not reach a collective reach another one in the same function."""
    scope = module.scope_of(call)
    for item in below(scope, into_functions=False):
        if isinstance(item, ast.Call) and item is not call and facts.collective(module, item):
            other = _guarded(facts, module, item)
            if other is not None and other != who:
                return True
    return False


def only_some_ranks(facts: Facts) -> Iterator[Report]:
    """Find collectives under a test of the rank."""
    if not facts.has_ranks:
        return
    for module, call, _ in facts.reported_calls:
        name = facts.collective(module, call) or _sharded_state(facts, module, call)
        inner = None
        if not name:
            inner = _collective_of_callee(facts, module, call)
            if inner is None:
                continue
            name = inner
        found = facts.ranks.local_guard(module, call)
        if found is None or _has_counterpart(facts, module, call, found[0]) or _is_in_both(facts, module, call):
            continue
        who, guard = found
        whom = "the ranks of this branch" if not guard.is_exit else "the ranks that have not left the function"
        shown = f"`{name}`" if inner is None else f"`{name}` in {method(call)}()"
        if who == "some" and not guard.is_exit:
            whom = "one rank"
        yield Report(
            module=module,
            node=call,
            what=f"{shown} is a collective, but only {whom} reach{'es' if whom == 'one rank' else ''} it: {HANG}",
            cure="Let all ranks call it: move it out of the branch, and keep in the branch only what one rank "
            "is to do.",
        )


def _sharded_state(facts: Facts, module: Module, call: ast.Call) -> str:
    """Return the text of a call that gathers the shards of an FSDP model; "" for others."""
    is_one = method(call) == "state_dict" and isinstance(call.func, ast.Attribute)
    if not is_one or not isinstance(call.func, ast.Attribute):
        return ""
    has_shards = facts.wrap_behind(module, call.func.value, "fsdp") is not None
    return f"{module.source.segment(call.func)}()" if has_shards else ""


def _collective_of_callee(facts: Facts, module: Module, call: ast.Call) -> str | None:
    """Return a collective that a called function reaches on all ranks that enter it."""
    for other, function, _ in facts.project.targets.get(call, ()):
        if function.name == "__init__" or (facts.ranks.spawned and function in facts.ranks.spawned):
            continue
        for item in below(function):
            if isinstance(item, ast.Call) and (name := facts.collective(other, item)):
                if name in ("new_group", "init_device_mesh"):
                    continue
                is_for_all = _guarded(facts, other, item) is None and not facts.ranks.is_single(other, item)
                if is_for_all and not _asks_for_parameter(facts, other, function, item):
                    return name
    return None


def _asks_for_parameter(facts: Facts, module: Module, function: Function, node: ast.AST) -> bool:
    """Return whether a place depends on an argument: who calls the function may give it as its own test says."""
    names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
    return any(words(guard.test) & names for guard in facts.ranks.guards(module, node))


def _is_in_both(facts: Facts, module: Module, call: ast.Call) -> bool:
    """Return whether the other branch of the `if` calls the same."""
    under: ast.AST = call
    for above in module.within(call):
        if isinstance(above, ast.If) and facts.ranks.who(module, above.test) is not None:
            other = above.orelse if any(item is under for item in above.body) else above.body
            for item in (node for statement in other for node in subtree(statement)):
                if isinstance(item, ast.Call) and (method(item) == method(call) or facts.collective(module, item)):
                    return True
        under = above
    return False


# --- leaving a loop


def left_early(facts: Facts) -> Iterator[Report]:
    """Find loops with collectives that a rank leaves, or whose rest it skips, for a reason of its own."""
    if not facts.has_group and not facts.accelerate and not facts.fabric:
        return
    for module in facts.reported:
        for node in module.nodes:
            if not isinstance(node, ast.Break | ast.Continue | ast.Return):
                continue
            loops = module.loops_of(node)
            if not loops or (isinstance(node, ast.Return) and not isinstance(module.scope_of(node), FUNCTIONS)):
                continue
            loop = loops[0]
            what = _reason(facts, module, node, loop)
            if what is None or not _communicates(facts, module, loop, node):
                continue
            verb = {ast.Break: "leaves the loop", ast.Continue: "skips the rest of this pass"}.get(
                type(node), "returns"
            )
            yield Report(
                module=module,
                node=node,
                what=f"{what} {verb}, while the others go on to a collective (in DDP each backward is one) and "
                f"wait for it",
                cure="Decide together: all_reduce the condition (MAX) or broadcast it from rank 0, and let all ranks "
                "leave at once.",
            )


def _reason(facts: Facts, module: Module, node: ast.stmt, loop: ast.AST) -> str | None:
    under: ast.AST = node
    for above in module.within(node):
        if above is loop:
            break
        if isinstance(above, ast.If):
            is_true = any(item is under for item in above.body)
            who = facts.ranks.who(module, above.test)
            if who is not None:
                return "rank 0 alone" if (who == "some") == is_true else "every rank but one"
            if is_true and _is_decided_alone(facts, module, above.test):
                return "rank 0, which alone has set the condition,"
            if is_true and _is_of_loss(facts, module, above.test, loop):
                return "a rank whose own loss meets the condition"
        under = above
    return None


def _is_decided_alone(facts: Facts, module: Module, test: ast.expr) -> bool:
    """Return whether a test is of a variable that is set under a test of the rank, and that nothing hands on."""
    scope = module.scope_of(test)
    calls = [node for node in below(scope, into_functions=False) if isinstance(node, ast.Call)]
    for item in subtree(test):
        if not isinstance(item, ast.Name):
            continue
        values = module.names.get(scope, {}).get(item.id, [])
        alone = [a for a in values if _is_set_alone(facts, module, a.value, a.statement)]
        is_shared = any(
            item.id in words(node) and (facts.collective(module, node) or "broadcast" in method(node)) for node in calls
        )
        if alone and not is_shared and all(isinstance(a.value, ast.Constant) for a in values):
            return True
    return False


def _is_set_alone(facts: Facts, module: Module, value: ast.expr, statement: ast.AST) -> bool:
    found = facts.ranks.local_guard(module, statement)
    is_truth = isinstance(value, ast.Constant) and isinstance(value.value, bool)
    return is_truth and found is not None and found[0] == "some" and not found[1].is_exit


def _is_of_loss(facts: Facts, module: Module, test: ast.expr, loop: ast.AST) -> bool:
    """Return whether a test is about the loss of this rank's batch, which nothing has reduced."""
    if facts.deepspeed or facts.lightning:
        return False
    names = {word.lower() for word in words(test)}
    checks = names & {"isnan", "isfinite", "isinf", "is_nan", "item"}
    named = {n for n in names if n == "loss" or n.endswith("_loss") or n in ("loss_value", "loss_val")}
    if not named or not (checks or isinstance(test, ast.Compare)):
        return False
    if any(
        ("val" in n and n not in ("loss_value", "loss_val")) or "test" in n or "reduced" in n or "avg" in n
        for n in named
    ):
        return False
    # a loss that was reduced in the loop is the same on all ranks
    body = body_of(loop)
    return not any(
        isinstance(item, ast.Call)
        and ("reduce" in method(item) or "gather" in method(item) or facts.collective(module, item))
        for item in subtree(body)
    )


def _communicates(facts: Facts, module: Module, loop: ast.AST, leaving: ast.AST) -> bool:
    body = body_of(loop)
    if next(iter(facts.collectives_below(module, body)), None) is not None:
        return True
    is_parallel = any(wrap.kind != "dp" for wrap in facts.wraps) or facts.accelerate or facts.fabric or facts.horovod
    return is_parallel and facts.has_backward(module, body)


def in_handler(facts: Facts) -> Iterator[Report]:
    """Find collectives in handlers of exceptions, and handlers that swallow what interrupts a backward."""
    if not facts.has_ranks:
        return
    for module in facts.reported:
        for node in module.nodes:
            if not isinstance(node, ast.Try):
                continue
            for handler in node.handlers:
                if handler.type is not None and words(handler.type) & {
                    "ImportError",
                    "ModuleNotFoundError",
                    "StopIteration",
                }:
                    continue
                body = ast.Module(body=[*handler.body], type_ignores=[])
                found = next((i for i in below(body) if isinstance(i, ast.Call) and facts.collective(module, i)), None)
                if found is not None:
                    name = facts.collective(module, found)
                    yield Report(
                        module=module,
                        node=found,
                        what=f"`{name}` is a collective that only a rank with an exception reaches: {HANG}",
                        cure="Leave collectives out of the handler: let the rank fail, or agree on the failure "
                        "outside of it.",
                    )
                elif _swallows(handler) and _trains(facts, module, node):
                    yield Report(
                        module=module,
                        node=handler,
                        what="a rank that gets this exception goes on without the collectives of the step (in DDP the "
                        "backward), for which the others wait, or which they match with the next step's",
                        cure="Let the rank fail (`raise`), or all_reduce whether any rank failed before all skip "
                        "the step.",
                    )


def _swallows(handler: ast.ExceptHandler) -> bool:
    if any(isinstance(item, ast.Raise) for item in subtree(handler)):
        return False
    named = words(handler.type) if handler.type is not None else set()
    if named & {"KeyboardInterrupt", "StopIteration", "SystemExit"}:
        return False
    calls = [method(item) for item in subtree(handler) if isinstance(item, ast.Call)]
    return not any(name in ("exit", "_exit", "abort", "kill", "destroy_process_group") for name in calls) and not (
        leaves(handler.body) and isinstance(handler.body[-1], ast.Return)
    )


def _trains(facts: Facts, module: Module, node: ast.Try) -> bool:
    body = ast.Module(body=[*node.body], type_ignores=[])
    is_parallel = any(wrap.kind != "dp" for wrap in facts.wraps) or facts.horovod or facts.accelerate
    loops = module.loops_of(node)
    if not is_parallel or not loops:
        return False
    has_backward = any(isinstance(item, ast.Call) and method(item) == "backward" for item in subtree(body))
    # without a step the loop measures something
    has_backward = has_backward or facts.has_backward(module, body)
    return has_backward and any(
        isinstance(item, ast.Call) and "step" in method(item)
        for _, part in facts.project.with_called(module, loops[-1])
        for item in subtree(part)
    )


# --- around DDP


def around_wrapper(facts: Facts) -> Iterator[Report]:
    """Find training steps that call the model inside DDP instead of DDP."""
    for module, call, _ in facts.reported_calls:
        func = call.func
        if isinstance(func, ast.Attribute) and func.attr == "forward":
            func = func.value
        name = plain_name(func)
        if not name or not facts.in_training(module, call):
            continue
        inner = _inner(facts, module, func)
        if inner is None or facts.is_evaluation(module, call) or not _is_trained_on(facts, module, call):
            continue
        wrap, owner = inner
        kind = {"ddp": "DistributedDataParallel", "fsdp": "FSDP", "dp": "DataParallel"}[wrap]
        effect = (
            "only the first device computes"
            if wrap == "dp"
            else "its forward prepares nothing, and gradients are not averaged: the ranks' weights drift apart"
        )
        is_direct = isinstance(call.func, ast.Attribute) and call.func.attr == "module"
        yield Report(
            module=module,
            node=call,
            what=f"this calls the model inside {kind} and goes past it: {effect}",
            cure=f"Call the wrapped model itself, `{owner}(…)`; `.module` is for saving and for reading attributes.",
            edits=(replaced(module, func, owner),) if is_direct else (),
            is_safe=is_direct,
        )


def _inner(facts: Facts, module: Module, func: ast.expr) -> tuple[str, str] | None:
    """Return the kind of wrapper around what is called, and its name, if it is the module inside one."""
    candidates = [(module, func)]
    if isinstance(func, ast.Name):
        candidates += [
            (o.module, o.node)
            for o in facts.project.origins(module, func)
            if isinstance(o.node, ast.expr) and isinstance(o.node, ast.Attribute)
        ]
        scope = module.scope_of(func)
        candidates += [(module, a.value) for a in module.names.get(scope, {}).get(func.id, [])]
    for other, node in candidates:
        if isinstance(node, ast.Attribute) and node.attr == "module":
            wrap = facts.wrap_behind(other, node.value, "ddp fsdp dp")
            if wrap is not None:
                return wrap.kind, other.source.segment(node.value)
    return _inner_attribute(facts, module, func)


def _inner_attribute(facts: Facts, module: Module, func: ast.expr) -> tuple[str, str] | None:
    """Return the wrapper of `self.net` that is another attribute, as in `self.model = DDP(self.net)`."""
    name = plain_name(func)
    if not name.startswith("self.") or facts.wrap_behind(module, func, "ddp fsdp dp") is not None:
        return None
    for wrap in facts.wraps:
        statement = wrap.module.statement_of(wrap.call)
        targets = [plain_name(target) for target in getattr(statement, "targets", [])]
        is_own = wrap.module is module and module.class_of(wrap.call) is module.class_of(func)
        is_other = any(target.startswith("self.") and target != name for target in targets)
        if is_own and is_other and wrap.model is not None and plain_name(wrap.model) == name:
            return wrap.kind, targets[0]
    return None


def _is_trained_on(facts: Facts, module: Module, call: ast.Call) -> bool:
    """Return whether a function or loop around a call computes gradients after it."""
    scope: ast.AST = module.scope_of(call)
    loops = module.loops_of(call)
    around = loops[0] if loops else scope
    if facts.has_backward(module, around):
        return True
    return isinstance(scope, Function) and any(
        facts.has_backward(site.module, site.module.scope_of(site.call)) for site in facts.project.sites.get(scope, ())
    )
