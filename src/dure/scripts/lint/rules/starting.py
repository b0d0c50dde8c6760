"""Rules on how ranks start, meet and end."""

import ast
import re
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts
from dure.scripts.lint.finding import Edit, Report, inserted_after, replaced, with_argument
from dure.scripts.lint.modules import (
    FUNCTIONS,
    Module,
    argument,
    constant,
    keyword,
    last,
    method,
    plain_name,
    subtree,
    words,
)

ADDRESS = re.compile(r"tcp://(\[?[^/]*?\]?)(?::(\d+))?/?$")
EVERYWHERE = {"0.0.0.0", "::", "[::]", "*"}  # noqa: S104
MOST_WORKERS = 12
"""Workers of one loader above which, on each of several ranks, they are more than the cores of most hosts."""


def _variables(module: Module) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Yield each `os.environ[name] = value`, also by `update`."""
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and last(plain_name(target.value)) == "environ":
                    yield node, str(constant(target.slice)), node.value
        elif isinstance(node, ast.Call) and method(node) == "putenv" and len(node.args) == 2:
            yield node, str(constant(node.args[0])), node.args[1]
        elif (
            isinstance(node, ast.Call)
            and method(node) == "update"
            and isinstance(node.func, ast.Attribute)
            and last(plain_name(node.func.value)) == "environ"
        ):
            yield from ((node, item.arg, item.value) for item in node.keywords if item.arg)
            for arg in node.args:
                if isinstance(arg, ast.Dict):
                    yield from ((node, str(constant(k)), v) for k, v in zip(arg.keys, arg.values, strict=True))


def _addresses(facts: Facts) -> Iterator[tuple[Module, ast.expr, str, str, bool]]:
    """Yield the texts of `tcp://` addresses: module, node, host, port, and whether a flag can change it."""
    for module, call, name in facts.calls():
        leaf = last(name)
        if leaf == "init_process_group":
            value = keyword(call, "init_method") or (call.args[1] if len(call.args) > 1 else None)
            for origin in facts.project.origins(module, value) if value is not None else ():
                if isinstance(origin.node, ast.expr):
                    yield from _parts(facts, origin.module, origin.node, False)
        elif leaf == "add_argument" and any("url" in str(constant(a)) or "init" in str(constant(a)) for a in call.args):
            value = keyword(call, "default")
            if value is not None:
                yield from _parts(facts, module, value, True)


def _parts(
    facts: Facts, module: Module, node: ast.expr, is_default: bool
) -> Iterator[tuple[Module, ast.expr, str, str, bool]]:
    text = constant(node)
    if isinstance(node, ast.JoinedStr):
        text = "".join(_part_of_text(facts, module, value) for value in node.values)
    if isinstance(text, str) and (found := ADDRESS.match(text)):
        yield module, node, found[1], found[2] or "", is_default


def _part_of_text(facts: Facts, module: Module, value: ast.expr) -> str:
    """Return a part of an f-string, as far as it is a constant; `?` for others."""
    if isinstance(value, ast.FormattedValue):
        origins = facts.project.origins(module, value.value)
        values = {str(constant(o.node)) for o in origins if isinstance(o.node, ast.Constant)}
        return values.pop() if len(values) == 1 else "?"
    return str(constant(value))


LOOPBACK = {"localhost", "127.0.0.1", "::1", "[::1]"}


def on_all_interfaces(facts: Facts) -> Iterator[Report]:
    """Find addresses of every interface, and loopback ones at which torch's store listens on all of them."""
    cure = (
        "Leave the rendezvous to a launcher that binds it (`dure run` listens on 127.0.0.1 on one host), with plain "
        "`init_process_group(backend)`; between hosts, name the address of the private network."
    )
    done = set()
    found: list[tuple[Module, ast.AST, str]] = [(m, node, host) for m, node, host, _, _ in _addresses(facts)]
    for module in facts.reported if facts.has_ranks else ():
        for node, name, value in _variables(module):
            text = constant(value)
            is_checked = any(_is_unset(g.test) for g in facts.ranks.guards(module, node))
            if (
                name == "MASTER_ADDR"
                and isinstance(text, str)
                and not is_checked
                and not facts.ranks.is_without_ranks(module, node)
            ):
                found.append((module, node, text))
    for module, call, name in facts.calls():
        host_node = argument(call, "host_name", 0) if last(name) == "TCPStore" else None
        if (
            isinstance(host_node, ast.Constant)
            and isinstance(host_node.value, str)
            and not isinstance(keyword(call, "master_listen_fd"), ast.expr)
        ):
            found.append((module, call, host_node.value))
    for module, node, host in found:
        if host not in EVERYWHERE | LOOPBACK or node in done:
            continue
        done.add(node)
        is_loopback = host in LOOPBACK
        first = (
            f"`{host}` is only where ranks connect: torch's store listens on all interfaces of rank 0's host, "
            f"whatever address is given"
            if is_loopback
            else "the store listens on all interfaces of the host, and for the other ranks this is no address to "
            "connect to"
        )
        yield Report(
            module=module,
            node=node,
            what=f"{first}; it has no password: whoever reaches the port can join, read and disturb the run",
            cure=cure,
        )


def fixed_port(facts: Facts) -> Iterator[Report]:
    """Find ports that are written into the script."""
    what = (
        "the port is written into the script: a second run on the host, or one whose predecessor has not ended, "
        "fails with "
        "`address already in use`, or meets the other's ranks"
    )
    cure = (
        'Leave address and port to the launcher (`dure run`, torchrun: `init_method="env://"`), or pick a free port '
        "before the ranks start."
    )
    done = set()
    for module, node, host, port, is_default in _addresses(facts):
        if port and port != "0" and node not in done and "?" not in host + port:
            done.add(node)
            more = what.replace("into the script", "into the flag's default") if is_default else what
            yield Report(module=module, node=node, what=more, cure=cure)
    for module in facts.reported:
        for place, name, value in _variables(module):
            if name != "MASTER_PORT" or not _is_number(facts, module, value) or not facts.has_ranks:
                continue
            if any("MASTER_PORT" in {constant(i) for i in subtree(g.test)} or _is_unset(g.test)
                   for g in facts.ranks.guards(module, place)):  # fmt: skip
                continue
            if facts.ranks.is_without_ranks(module, place):
                continue
            yield Report(module=module, node=place, what=what, cure=cure)


def _is_unset(test: ast.expr) -> bool:
    return any(constant(item) in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") for item in subtree(test))


def _is_number(facts: Facts, module: Module, value: ast.expr) -> bool:
    text = constant(value)
    if isinstance(value, ast.Call) and method(value) == "str" and value.args:
        return _is_number(facts, module, value.args[0])
    if isinstance(text, str | int) and not isinstance(text, bool):
        return str(text).isdigit() and str(text) != "0"
    if isinstance(value, ast.Name):
        origins = facts.project.origins(module, value)
        return bool(origins) and all(
            isinstance(o.node, ast.Constant) and str(o.node.value).isdigit() and str(o.node.value) != "0"
            for o in origins
        )
    return False


def removed_argument(facts: Facts) -> Iterator[Report]:
    """Find scripts that take their local rank from the argument that launchers no longer pass."""
    if not facts.has_group or facts.deepspeed or facts.horovod:
        return
    reads = any(
        constant(node) == "LOCAL_RANK"
        for module in facts.project.modules
        for node in module.nodes
        if isinstance(node, ast.Constant)
    )
    if reads:
        return
    for module, call, name in facts.calls():
        flags = [constant(arg) for arg in call.args]
        if last(name) != "add_argument" or not {"--local_rank", "--local-rank"} & {str(flag) for flag in flags}:
            continue
        if not any(
            isinstance(node, ast.Attribute) and node.attr == "local_rank" and isinstance(node.ctx, ast.Load)
            and plain_name(node.value) not in ("self", "")
            for other in facts.project.modules
            for node in other.nodes
        ):  # fmt: skip
            continue
        yield Report(
            module=module,
            node=call,
            what="torchrun and `dure run` set the variable LOCAL_RANK and pass no --local_rank "
            "(torch.distributed.launch, which did, passes "
            "--local-rank since 2.0): every rank gets the default and uses the same device",
            cure='Take the default from the environment: `default=int(os.environ.get("LOCAL_RANK", 0))`.',
            edits=(edits := _default_from_environment(module, call)),
            is_safe=bool(edits),
        )


def _default_from_environment(module: Module, call: ast.Call) -> tuple[Edit, ...]:
    if module.imports.get("os") != "os":
        return ()
    default = keyword(call, "default")
    number = module.source.segment(default) if default is not None else "0"
    if not re.fullmatch(r"-?\d+", number):
        return ()
    text = f'int(os.environ.get("LOCAL_RANK", {number}))'
    if default is not None:
        return (replaced(module, default, text),)
    if keyword(call, "required") is not None:
        return ()
    return with_argument(module, call, f"default={text}")


def never_destroyed(facts: Facts) -> Iterator[Report]:
    """Find process groups that are opened and never destroyed."""
    if not facts.is_entry or facts.lightning or facts.deepspeed:
        return
    ends = {"destroy_process_group", "end_training", "dist_cleanup", "destroy_parallel_group"}
    ended = [(m, c) for m, c, name in facts.calls() if last(name) in ends or "destroy" in last(name)]
    if any(_is_reached(facts, module, call) for module, call in ended):
        return
    if not ended and facts.words & ends:  # handed on: atexit.register(dist.destroy_process_group)
        return
    opened = [
        (m, c) for m, c, name in facts.calls() if last(name) == "init_process_group" and not last(name).startswith("_")
    ]
    for module, call in opened[:1]:
        yield Report(
            module=module,
            node=call,
            what="nothing calls `destroy_process_group`: at the end of the script ranks leave while others may still "
            "communicate, which "
            "warns of leaked resources and can hang or abort a run that was done",
            cure="Call `torch.distributed.destroy_process_group()` on all ranks when training is over.",
            edits=_destroyed(facts, module, call),
        )


def _is_reached(facts: Facts, module: Module, call: ast.Call) -> bool:
    """Return whether anything names the function that a call is in."""
    scope = module.scope_of(call)
    if not isinstance(scope, FUNCTIONS) or module.class_of(call) is not None or facts.project.sites.get(scope):
        return True
    return scope.name in facts.words


def _destroyed(facts: Facts, module: Module, call: ast.Call) -> tuple[Edit, ...]:
    """Return the edit that destroys the group at the end of the function that opens it, or that calls what opens it."""
    name = module.source.segment(call.func)
    if not name.endswith("init_process_group") or "." not in name:
        return ()
    destroy = f"{name.removesuffix('init_process_group')}destroy_process_group()"
    scope = module.scope_of(call)
    if not isinstance(scope, FUNCTIONS) or module.loops_of(call):
        return ()
    trains = any(module.scope_of(loop) is scope for other, loop in facts.step_loops if other is module) or any(
        function is not scope and facts.has_backward(other, function)
        for other, function in facts.project.called_functions(scope)
    )
    if not trains:
        sites = [s for s in facts.project.sites.get(scope, []) if s.module is module and not s.is_spawn]
        if len(sites) != 1 or not isinstance(module.scope_of(sites[0].call), FUNCTIONS):
            return ()
        scope = module.scope_of(sites[0].call)
    assert isinstance(scope, FUNCTIONS)
    end = scope.body[-1]
    if isinstance(end, ast.Return | ast.Raise) or facts.ranks.is_single(module, call):
        return ()
    return inserted_after(module, end, [destroy])


def too_many_workers(facts: Facts) -> Iterator[Report]:
    """Find loaders of each rank that start as many processes as the host has cores, or many."""
    if not facts.has_ranks:
        return
    for module, call, name in facts.reported_calls:
        if last(name) not in ("DataLoader", "MultiEpochsDataLoader"):
            continue
        value = argument(call, "num_workers", 5)
        if value is None:
            continue
        number = constant(value)
        shown = ""
        if isinstance(number, int) and number >= MOST_WORKERS:
            shown = f"{number} processes"
            per = f": 8 ranks start {8 * number} on one host"
        elif _is_all_cores(facts, module, value):
            shown, per = "as many processes as the host has cores", ": N ranks start N times as many as there are cores"
        if not shown or facts.ranks.is_without_ranks(module, call):
            continue
        yield Report(
            module=module,
            node=call,
            what=f"the loader of each rank starts {shown}{per}, beside the ranks themselves, and they take the cores "
            f"from each other",
            cure="Divide the cores by the ranks of the host: `num_workers=max(1, os.cpu_count() // "
            "local_world_size - 1)`.",
        )


def _is_chosen_by_ranks(facts: Facts, module: Module, value: ast.expr) -> bool:
    """Return whether the number is another one if there are several ranks."""
    written = plain_name(value)
    scopes = [module.names.get(scope, {}).get(written, []) for scope in facts.project.scopes(module, value)]
    values = [assignment.value for found in scopes for assignment in found] + [value]
    return any(
        facts.ranks.asks_for_ranks(module, item)
        for node in values
        for item in subtree(node)
        if isinstance(item, ast.expr) and isinstance(item, ast.IfExp | ast.Compare | ast.Attribute | ast.Name)
    )


def _is_all_cores(facts: Facts, module: Module, value: ast.expr) -> bool:
    if _is_chosen_by_ranks(facts, module, value):
        return False
    for origin in facts.project.origins(module, value):
        node = origin.node
        if isinstance(node, ast.arg):
            continue
        has_cores = any(
            isinstance(i, ast.Call) and method(i) in ("cpu_count", "sched_getaffinity") for i in subtree(node)
        )
        if not has_cores:
            continue
        if any(isinstance(i, ast.BinOp) and isinstance(i.op, ast.Div | ast.FloorDiv) for i in subtree(node)):
            continue
        if node in origin.module.parents and facts.ranks.is_single(origin.module, node):
            continue
        limit = [i for i in subtree(node) if isinstance(i, ast.Call) and method(i) == "min"]
        if not limit:
            return not words(node) & {"world_size", "get_world_size", "device_count", "local_world_size"}
    return False
