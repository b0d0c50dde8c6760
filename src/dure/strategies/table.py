"""Table of strategies: what each divides, preserves and needs. Importing it does not import torch."""

import importlib
from typing import TYPE_CHECKING

from dure.errors import EnvironmentLacks
from dure.strategies.contract.info import StrategyInfo
from dure.strategies.installed import Strategies

if TYPE_CHECKING:
    from dure.strategies.contract.strategy import Strategy


_BATCHNORM = "BatchNorm without --sync-batchnorm: statistics of each {unit}'s own samples, rank 0's are kept"
_COMPRESSION = "--{strategy}.compression: the gradient is approximated; see compression_error in the records"
REPLICAS = ("check_replicas_every", "on_divergence")
"""Settings of strategies with identical replicas on all ranks."""
COMPILED = ("compile", "compile_mode")
"""Settings of strategies whose model, or parts of it, `torch.compile` can compile."""
_HOOKS = "step hooks of the optimiser: each rank's run on its own weights, between averagings too"
_RANDOM = "random numbers in model and loss (dropout): other draws than on one device (augmentation is the same)"
_RANDOM_IN_HEADS = "random numbers inside scaled_dot_product_attention (dropout): the same draws for each rank's heads"
_BETWEEN_AVERAGINGS = (
    "loss and its record: between averagings each rank's own",
    "clipping: by the norm of each rank's own gradient",
    "BatchNorm: statistics of each rank's own samples, averaged with the parameters",
    _RANDOM,
    _HOOKS,
)
_SENT_BY_AVERAGING = (
    "every rank: 2 (P-1)/P W every H steps (through shared memory (1 + 1/P) W) and 40 bytes of facts; "
    "0 in the other H-1; 2 (P-1)/P G in each of the warmup_steps"
)

STRATEGIES = Strategies(
    (
        StrategyInfo(
            name="single",
            implementation="dure.strategies.single:Single",
            summary="one process, one device: what every other strategy is held to",
            divides="nothing",
            synchronises="never",
            preserves="everything: it is the definition",
            does_not_preserve=(),
            needs="a model, its gradients, optimiser state and activations that fit one device",
            sent_bytes="0",
            memory="W + G + S + A(microbatch)",
            right_when="the model trains fast enough on one device: it is always the most efficient per device",
            one_process=True,
            many_devices=False,
            default_for="one",
            settings=("on_nonfinite", *COMPILED, "sync_batchnorm"),
        ),
        StrategyInfo(
            name="dp",
            implementation="dure.strategies.data_parallel.dp:DataParallel",
            summary="one process, a thread per device; outputs gathered and the loss computed on device 0",
            divides="each microbatch over the devices of one process",
            synchronises="every microstep: parameters out, outputs gathered, gradients back",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(
                "BatchNorm: statistics of each device's own samples, device 0's are kept",
                _RANDOM,
            ),
            needs="one process that sees all devices; a model whose outputs have the samples first",
            sent_bytes="device 0: (P-1) W per microstep; every other device: G per microstep",
            memory="device 0: W + G + S + A(b/P) + all outputs and the loss; others: W + G + A(b/P)",
            right_when="to try a second device without a second process; ddp is faster in nearly every case",
            one_process=True,
            settings=("on_nonfinite",),
        ),
        StrategyInfo(
            name="balanced_dp",
            implementation="dure.strategies.data_parallel.balanced_dp:BalancedDataParallel",
            options="dure.strategies.data_parallel.options:BalancedOptions",
            summary="dp with the loss on the replicas and a smaller share for the fuller device 0",
            divides="each microbatch over the devices of one process, device 0's share given or found by memory",
            synchronises="every step: parameters out; every step: gradients back",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(
                "BatchNorm: statistics of each device's own samples, device 0's are kept",
                _RANDOM,
            ),
            needs="one process that sees all devices; batches whose tensors have the samples first",
            sent_bytes="device 0: (P-1) W per step; every other device: G per step",
            memory="device 0: W + G + S + A(share of device 0); others: W + G + A(their share)",
            settings=("on_nonfinite",),
            right_when="dp runs out of memory on device 0 while the others have room",
            one_process=True,
        ),
        StrategyInfo(
            name="ddp",
            implementation="dure.strategies.data_parallel.ddp:DDP",
            options="dure.strategies.data_parallel.options:DDPOptions",
            summary="a process per device; gradients all-reduced in buckets while backward still runs",
            divides="each global batch over the ranks",
            synchronises="every step: gradients, overlapped with the last microstep's backward",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(_BATCHNORM.format(unit="rank"), _RANDOM, _COMPRESSION.format(strategy="ddp")),
            needs="a model that fits one device; every parameter in every step, or --ddp.find-unused-parameters",
            sent_bytes="every rank: 2 (P-1)/P G per step",
            memory="W + G + S + A(microbatch), buckets share G's memory (--ddp.gradient-as-bucket-view)",
            default_for="many",
            settings=(
                "on_nonfinite",
                *REPLICAS,
                *COMPILED,
                "sync_batchnorm",
            ),
            right_when="the model fits one device and several should share the work: the first thing to try",
            one_process=False,
        ),
        StrategyInfo(
            name="ring_ddp",
            implementation="dure.strategies.data_parallel.ring_ddp:RingDDP",
            options="dure.strategies.data_parallel.options:RingDDPOptions",
            summary="ddp with a reducer of our own: one flat gradient buffer, any all-reduce algorithm, Apex's options",
            divides="each global batch over the ranks",
            synchronises="every step: gradients, bucket by bucket while the last microstep's backward still runs",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(_BATCHNORM.format(unit="rank"), _RANDOM, _COMPRESSION.format(strategy="ring-ddp")),
            needs="a model that fits one device, without sparse gradients; any parameter may be unused",
            sent_bytes="by the algorithm: 2 (P-1)/P G from every rank by a ring, (1 + 1/P) G through shared memory",
            memory="W + G + S + A(microbatch)",
            settings=(
                "on_nonfinite",
                *REPLICAS,
                *COMPILED,
                "sync_batchnorm",
                "comm",
            ),
            right_when="CPU ranks of one host (shared memory beats sockets), or to see and choose how gradients travel",
            one_process=False,
            checks_model=True,
        ),
        StrategyInfo(
            name="naive_ddp",
            implementation="dure.strategies.data_parallel.naive_ddp:NaiveDDP",
            summary="backward, then one all-reduce for each gradient, then the step: the plain twin of ddp",
            divides="each global batch over the ranks",
            synchronises="every step after backward, once for each parameter",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(_BATCHNORM.format(unit="rank"), _RANDOM),
            needs="a model that fits one device; any parameter may be unused",
            sent_bytes="by the algorithm, as ring_ddp, but in as many messages as there are parameters",
            memory="W + G + S + A(microbatch)",
            settings=("on_nonfinite", *REPLICAS, *COMPILED, "sync_batchnorm", "comm"),
            right_when="to understand data parallelism, or to check another strategy against the simplest one",
            one_process=False,
        ),
        StrategyInfo(
            name="zero1",
            implementation="dure.strategies.data_parallel.zero1:ZeRO1",
            options="dure.strategies.data_parallel.options:DDPOptions",
            summary="ddp with the optimiser's state divided over the ranks (ZeRO stage 1)",
            divides="each global batch over the ranks, and the optimiser's state, by whole parameters",
            synchronises="every step: gradients as ddp; then every rank sends the parameters that it has stepped",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(_BATCHNORM.format(unit="rank"), _RANDOM, _COMPRESSION.format(strategy="zero1")),
            needs="as ddp, and an optimiser that steps each parameter by itself (not LBFGS)",
            sent_bytes=(
                "every rank: 2 (P-1)/P G, and (P-1) times its part of the trainable parameters, about W/P; "
                "all together: 2 (P-1) G + (P-1) W"
            ),
            memory="W + G + S/P + A(microbatch); parts differ by at most the largest parameter's state",
            settings=(
                "on_nonfinite",
                *REPLICAS,
                *COMPILED,
                "sync_batchnorm",
            ),
            right_when="ddp would fit without the optimiser's state: AdamW's is twice the size of the weights",
            one_process=False,
            checks_model=True,
        ),
        StrategyInfo(
            name="fsdp",
            implementation="dure.strategies.sharded.fsdp:FSDP",
            options="dure.strategies.sharded.options:FSDPOptions",
            summary="parameters, gradients and optimiser state divided over the ranks (ZeRO stages 2 and 3)",
            divides="each global batch over replica and shard, every parameter over shard, layers over the axis tensor",
            synchronises="every microstep: parameters gathered unit by unit; every step: gradients reduced and divided",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(
                _BATCHNORM.format(unit="rank"),
                _RANDOM,
                "bf16 and fp16: a unit without BatchNorm computes in them throughout, its norms too",
                _RANDOM_IN_HEADS,
            ),
            needs="an optimiser that steps each element by itself; units that all ranks run, in one order",
            sent_bytes=(
                "every rank, with S shards, R replicas, n microsteps: (2n+1) (S-1)/S W, n less for what is outside the "
                "units (2 (S-1)/S W when kept after forward), + 2 (R-1)/R G/S; with T tensor ranks W and G are their "
                "parts, and layers send as in tensor_parallel; all together: P times that"
            ),
            memory=(
                "(W + G + S)/shards + the largest two units whole + A(microbatch); G whole while accumulating; W whole "
                "with --no-fsdp.reshard-after-forward; A less with --fsdp.activation-checkpointing"
            ),
            settings=(
                "on_nonfinite",
                *REPLICAS,
                *COMPILED,
                "sync_batchnorm",
            ),
            mesh_axes=("replica", "shard", "tensor"),
            main_axis="shard",
            alike_axes=("tensor",),
            right_when="the model, its gradients and its optimiser state do not fit one device, though one layer does",
            one_process=False,
            checks_model=True,
        ),
        StrategyInfo(
            name="model_parallel",
            implementation="dure.strategies.sections.model_parallel:ModelParallel",
            options="dure.strategies.sections.options:SectionOptions",
            summary="the model in sections on several devices of one process, one section at work at a time",
            divides="the model: consecutive blocks on each device, cut where bytes are even or by cuts",
            synchronises="every microstep: activations from section to section, their gradients back",
            preserves="weights after every step (to rounding), sample order, evaluation, BatchNorm's statistics",
            does_not_preserve=("random numbers (dropout): on several accelerators each draws of its own",),
            needs="one process that sees all devices; a model that is a chain of blocks, no weight shared over a cut",
            sent_bytes=(
                "per microstep, A_k the activations at cut k and Y the output: A_1 + ... + A_(P-1) + Y forward, and as "
                "much back; device k: A_(k+1) forward and A_k back"
            ),
            memory="device k: W + G + S + A(microbatch) of its own section; device 0 also the batch and the output",
            settings=("on_nonfinite",),
            right_when="the model does not fit one device and there is one process; pipeline keeps all devices at work",
            one_process=True,
            checks_model=True,
        ),
        StrategyInfo(
            name="pipeline",
            implementation="dure.strategies.pipeline.pipeline:Pipeline",
            options="dure.strategies.pipeline.options:PipelineOptions",
            summary="the model in stages on several ranks, which work on different microbatches at once",
            divides="the model: consecutive blocks on each rank, layers over the axis tensor; the batch over data",
            synchronises="every microbatch: activations from stage to stage, their gradients back",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(
                "BatchNorm: statistics of each microbatch (as with the same --microbatch-size on one device)",
                _RANDOM,
                _RANDOM_IN_HEADS,
            ),
            needs=(
                "a model that is a chain of blocks, no weight shared over a cut, called once by the loss; enough "
                "microbatches: with M of them and V stages per rank (P-1)/(V M + P-1) of a step is idle"
            ),
            sent_bytes=(
                "per microbatch, A_k the activations at cut k: rank k A_(k+1) forward and A_k back; all together "
                "2 (A_1 + ... + A_(VP-1)); with D pipelines also 2 (D-1)/D G of its own stages per step; with T tensor "
                "ranks each of them sends that for its part of G, and layers send as in tensor_parallel"
            ),
            memory=(
                "W + G + S of its own stages, the batch, and A(microbatch) of each microbatch on its way: at most P of "
                "them with 1f1b, all of them with gpipe; with T tensor ranks a T-th of what they divide"
            ),
            settings=(
                "on_nonfinite",
                *REPLICAS,
                *COMPILED,
            ),
            mesh_axes=("data", "pipeline", "tensor"),
            main_axis="pipeline",
            alike_axes=("pipeline", "tensor"),
            right_when="the model does not fit one device, and links are too slow to gather its parameters (fsdp)",
            one_process=False,
            checks_model=True,
        ),
        StrategyInfo(
            name="averaging",
            implementation="dure.strategies.local_sgd.averaging:Averaging",
            options="dure.strategies.local_sgd.options:AveragingOptions",
            summary="local SGD: every rank trains by itself, and every H steps the parameters are averaged",
            divides="each global batch over the ranks",
            synchronises="every H steps (average_every), and before an evaluation or a checkpoint; in between never",
            preserves="sample order, evaluation, and equal weights on all ranks whenever they are read",
            does_not_preserve=(
                "the trajectory: ranks step by gradients of their own shares, and only the mean of where they come to "
                "is kept; an evaluation or a checkpoint is an averaging too",
                *_BETWEEN_AVERAGINGS,
            ),
            needs="a model that fits one device; a learning rate that suits the share of one rank",
            sent_bytes=_SENT_BY_AVERAGING,
            memory="W + G + S + A(microbatch), and W while averaging",
            settings=(
                *COMPILED,
                "comm",
            ),
            right_when="the link is slow or ranks take uneven time, and another trajectory than ddp's is acceptable",
            one_process=False,
            is_exact=False,
        ),
        StrategyInfo(
            name="diloco",
            implementation="dure.strategies.local_sgd.diloco:DiLoCo",
            options="dure.strategies.local_sgd.options:DiLoCoOptions",
            summary="averaging with an outer step: Nesterov momentum over what each H local steps changed on the mean",
            divides="each global batch over the ranks",
            synchronises="every H steps (average_every), and before an evaluation or a checkpoint; in between never",
            preserves="sample order, evaluation, and equal weights on all ranks whenever they are read",
            does_not_preserve=(
                "the trajectory: ranks step by gradients of their own shares, and an outer optimiser follows the mean "
                "of where they come to; an evaluation or a checkpoint averages the ranks too",
                *_BETWEEN_AVERAGINGS,
            ),
            needs="a model that fits one device with two copies more; evaluations no more often than outer steps",
            sent_bytes=_SENT_BY_AVERAGING,
            memory="3 W + G + S + A(microbatch), and W while averaging: the anchor and the outer momentum",
            settings=(
                *COMPILED,
                "comm",
            ),
            right_when="ranks are far apart (hundreds of steps between averagings), and the run is long",
            one_process=False,
            is_exact=False,
        ),
        StrategyInfo(
            name="rpc_model",
            implementation="dure.strategies.sections.rpc_model:RpcModel",
            options="dure.strategies.sections.options:SectionOptions",
            summary="the model in sections on several processes, called and stepped from rank 0 by torch RPC",
            divides="the model: consecutive blocks on each rank, cut where bytes are even or by cuts",
            synchronises="every microstep: activations from section to section, their gradients back, one at work",
            preserves="weights after every step (to rounding), sample order, evaluation, BatchNorm's statistics",
            does_not_preserve=(_RANDOM,),
            needs=(
                "a model that is a chain of blocks, no weight shared over a cut; a network that is trusted: RPC runs "
                "what peers send (processes of one host by memory, unless TP_SOCKET_IFNAME names an interface)"
            ),
            sent_bytes=(
                "per microstep, B the arguments of the model, A_k the activations at cut k and Y the output: rank 0 "
                "(P-1) B + A_1 forward and Y back; rank k A_(k+1) forward (the last Y) and A_k back"
            ),
            memory="rank k: W + G + S + A(microbatch) of its own section; rank 0 also the batch and the output",
            right_when="sections are on several processes and rank 0 alone may have the data; else pipeline is faster",
            one_process=False,
            exchanges_on_host=True,
            checks_model=True,
        ),
        StrategyInfo(
            name="parameter_server",
            implementation="dure.strategies.parameter_server.parameter_server:ParameterServer",
            options="dure.strategies.parameter_server.options:ParameterServerOptions",
            summary="workers push gradients, servers without a device keep the parameters and step them",
            divides="each global batch over the workers; parameters and optimiser state over the servers, by rows",
            synchronises=(
                "every step: gradients to the servers, parameters back; without sync a worker waits only for its own "
                "answer, held back while it is more than `staleness` steps ahead of the slowest, and all wait for each "
                "other before an evaluation or a checkpoint"
            ),
            preserves="weights after every step (to rounding), sample order, evaluation; without sync: the last two",
            does_not_preserve=(
                "without sync: a gradient is of weights that others have changed since (staleness in the records): the "
                "trajectory is another one, and never twice the same",
                "without sync: loss and its record: each worker's own",
                "without sync: clipping: by the norm of each worker's own gradient",
                "without sync: a worker that is killed is missed from then on, and so are its shares until they are "
                "divided among the others: rank_lost in events.jsonl",
                "BatchNorm: statistics of each worker's own samples, rank 0's are kept",
                _RANDOM,
            ),
            needs=(
                "K processes in addition to the P workers (servers), and an optimiser that steps each parameter by "
                "itself; "
                "every server for as long as the run lasts, and in step every worker; with transport rpc a network "
                "that is trusted: RPC runs what peers send (processes of one host by memory, unless TP_SOCKET_IFNAME "
                "names an interface)"
            ),
            sent_bytes=(
                "a worker: G per step; each of K servers: P W/K; all together: P (G + W) (of W and G what is trained)"
            ),
            memory="a worker: 2 W + 2 G + A(microbatch); each of K servers: (W + S + P G)/K",
            settings=(*REPLICAS,),
            outlives_ranks_without="sync",
            right_when="hosts without accelerators have memory and links to spare, or workers are of uneven speed",
            one_process=False,
            extra_processes="servers",
            checks_model=True,
        ),
        StrategyInfo(
            name="tensor_parallel",
            implementation="dure.strategies.tensor_parallel.tensor_parallel:TensorParallel",
            options="dure.strategies.tensor_parallel.options:TensorParallelOptions",
            summary="Linear, Embedding and attention layers divided over ranks that work on the same samples",
            divides="layers over the tensor axis, each global batch over the data axis",
            synchronises="in every layer's forward and backward over the tensor axis; every step over the data axis",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(
                "BatchNorm: statistics of each data rank's own samples, rank 0's are kept",
                "random numbers (dropout): other draws than on one device when there are several data ranks",
                _RANDOM_IN_HEADS,
            ),
            needs="nn.Linear or nn.Embedding layers; an optimiser that steps each element by itself; fast links",
            sent_bytes=(
                "T tensor, D data ranks, A bytes of a layer's whole input or output; every rank, each microstep: "
                "2 (T-1)/T A in forward for row and vocab, (T-1)/T A for gathered; 2 (T-1)/T A in backward for column "
                "and gathered, (T-1)/T A for a row whose input was whole; with --tensor-parallel.sequence-parallel "
                "(T-1)/T A more in backward for column; each step 2 (D-1)/D of its part of G; all together: P times"
            ),
            memory=(
                "(W + G + S)/T of what is divided + W + G + S of the rest + A(microbatch), divided inside regions, and "
                "between them with --tensor-parallel.sequence-parallel"
            ),
            settings=(
                "on_nonfinite",
                *REPLICAS,
            ),
            mesh_axes=("data", "tensor"),
            alike_axes=("tensor",),
            right_when="one layer is too large for a device, or a step must be faster than data parallel ones can be",
            one_process=False,
            checks_model=True,
        ),
    )
)
"""All strategies by name: these rows, and those of installed packages."""


def load_strategy(name: str) -> "type[Strategy]":
    """Import the class that implements a strategy of the table.

    Raises:
        EnvironmentLacks: The strategy comes from a package, and its class cannot be imported.
    """
    module, _, class_name = STRATEGIES[name].implementation.partition(":")
    if name in STRATEGIES.own:
        return getattr(importlib.import_module(module), class_name)  # type: ignore[no-any-return]
    from dure.strategies.contract.strategy import Strategy

    try:
        found = getattr(importlib.import_module(module), class_name)
    except Exception as error:  # a package's module may raise anything when it is imported
        reason = str(error).split("\n")[0] or type(error).__name__
        raise EnvironmentLacks(
            f"strategy {name} cannot be used, because {module}:{class_name} cannot be imported ({reason:.300}): update "
            "the package that brings it, or choose another strategy"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise EnvironmentLacks(
            f"strategy {name} cannot be used, because {module}:{class_name} is no class of "
            "dure.strategies.contract.strategy.Strategy: update the package that brings it, or choose another strategy"
        )
    return found
