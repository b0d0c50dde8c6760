"""Settings of other training tools, and their equivalents in dure."""

from collections.abc import Callable, Collection

_TASK = "the optimiser is the task's: set it in build_optimizer, and make it an option of the task to vary it ({task})"

_PLACES = {
    # optimiser and model
    _TASK: (
        *("lr", "learning_rate", "base_lr", "weight_decay", "wd", "momentum", "betas", "beta1", "beta2", "eps"),
        *("optimizer", "optim", "opt"),
    ),
    "the schedule is the task's: return it from build_schedule, as a function of samples seen": (
        *(
            "lr_scheduler",
            "scheduler",
            "lr_scheduler_type",
            "warmup",
            "warmup_ratio",
            "warmup_epochs",
            "num_warmup_steps",
        ),
        *("lr_decay", "lr_warmup_steps", "min_lr", "gamma"),
    ),
    "the model and the data are the task's: make it an option of the task ({task})": (
        *(
            "model",
            "arch",
            "model_name",
            "model_name_or_path",
            "dataset",
            "dataset_name",
            "data",
            "data_dir",
            "data_path",
        ),
        *("train_file", "hidden_size", "dropout", "pretrained", "tokenizer", "image_size", "num_classes"),
    ),
    # length, batch size and frequency
    "use {epochs}": ("max_epochs", "num_epochs", "num_train_epochs", "n_epochs", "epoch", "ep"),
    "use {samples}, which is steps x {global_batch_size}": (
        *("max_steps", "num_steps", "total_steps", "train_steps", "steps", "max_iters", "iterations", "num_iterations"),
        *("max_train_steps", "limit_train_batches", "max_duration"),
    ),
    "use {global_batch_size}: samples per optimiser step, over all ranks": (
        *(
            "batch_size",
            "batchsize",
            "bs",
            "b",
            "train_batch_size",
            "total_batch_size",
            "batch",
            "effective_batch_size",
        ),
    ),
    "use {microbatch_size}: most samples per backward on one device; {global_batch_size} counts those of all ranks": (
        *("per_device_train_batch_size", "per_device_batch_size", "per_gpu_batch_size", "micro_batch_size"),
        *(
            "microbatch",
            "train_micro_batch_size_per_gpu",
            "batch_size_per_gpu",
            "device_batch_size",
            "local_batch_size",
        ),
    ),
    "it follows from {global_batch_size} and {microbatch_size}: give these": (
        *("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "grad_accumulation_steps"),
        *("accumulation_steps", "accum_iter", "gradient_accumulation"),
    ),
    "use {clip_norm}": (
        *(
            "grad_clip",
            "clip",
            "max_grad_norm",
            "clip_grad_norm",
            "clip_grad",
            "gradient_clip_val",
            "gradient_clipping",
        ),
    ),
    "use {seed}": ("seed_everything", "random_seed", "manual_seed", "rng_seed", "global_seed"),
    # devices and precision
    "use {nproc}": (
        *("gpus", "devices", "num_gpus", "n_gpus", "ngpus", "num_devices", "n_devices", "world_size", "num_processes"),
        *(
            "nprocs",
            "np",
            "n_proc",
            "num_procs",
            "processes",
            "ranks",
            "num_ranks",
            "gpus_per_node",
            "devices_per_node",
        ),
        *("num_proc", "ntasks", "num_workers_per_node"),
    ),
    "use {nnodes}": ("num_nodes", "nodes", "num_machines", "num_hosts", "hosts"),
    "dure gives each process its rank: leave it out": ("local_rank", "rank", "global_rank"),
    "use {node_rank}": ("machine_rank",),
    "use {rendezvous}, as HOST:PORT": (
        *("master_addr", "master_port", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "main_process_ip", "dist_url"),
        *("main_process_port", "init_method"),
    ),
    "use {device}": (
        "accelerator",
        "cuda",
        "gpu",
        "cpu",
        "no_cuda",
        "use_cuda",
        "use_cpu",
        "use_gpu",
        "gpu_id",
        "gpu_ids",
    ),
    "use {backend}": ("dist_backend", "process_group_backend", "ddp_backend", "nccl", "gloo"),
    "use {strategy}, as fsdp or zero1: they divide what DeepSpeed's stages divide": (
        *("deepspeed", "zero", "zero_stage", "zero_optimization", "deepspeed_config", "fully_sharded", "fsdp"),
    ),
    "use {strategy}": ("ddp", "dp", "distributed", "parallel", "plugins", "distribution_strategy", "distributed_type"),
    "use {precision} bf16 or fp16": (
        *("fp16", "bf16", "half", "amp", "use_amp", "mixed_precision", "autocast", "bfloat16", "float16", "dtype"),
    ),
    "use {precision} tf32": ("tf32", "allow_tf32", "float32_matmul_precision"),
    "use {prefetch_factor}": ("prefetch", "dataloader_prefetch_factor"),
    "use {num_workers}": (
        *("workers", "j", "num_data_workers", "dataloader_num_workers", "loader_workers", "data_workers", "n_workers"),
    ),
    "use {fsdp.activation_checkpointing}, which {strategy} fsdp has": (
        "gradient_checkpointing",
        "grad_checkpointing",
        "activation_checkpoint",
    ),
    "use {sync_batchnorm}": ("sync_bn", "syncbn", "sync_batch_norm"),
    "use {compile}": ("torch_compile", "compile_model", "torchcompile"),
    # output and its frequency
    "use {runs_dir}, and {name} for the run's own folder in it": (
        *("output_dir", "out_dir", "out", "output", "save_dir", "log_dir", "logdir", "default_root_dir", "work_dir"),
        *("workdir", "checkpoint_dir", "ckpt_dir", "exp_dir", "save_path", "logging_dir", "o"),
    ),
    "use {name}": ("experiment_name", "exp_name", "run_name", "exp", "experiment", "job_name"),
    "use {resume}, with a run's folder": (
        *(
            "ckpt",
            "checkpoint",
            "ckpt_path",
            "checkpoint_path",
            "resume_from",
            "resume_from_checkpoint",
            "load",
            "restore",
        ),
        *("load_checkpoint", "resume_path", "auto_resume", "continue", "restart"),
    ),
    "use {checkpoint.every_samples} or {checkpoint.every_minutes}": (
        *("save_every", "save_steps", "save_interval", "checkpoint_every", "ckpt_every", "save_freq", "save_strategy"),
        *("checkpoint_interval", "checkpointing_steps", "save_every_n_steps", "every_n_train_steps"),
    ),
    "use {checkpoint.keep}": ("save_total_limit", "save_top_k", "keep_last", "max_checkpoints"),
    "use {eval_every_epochs}": (
        *("val_every", "eval_every", "eval_steps", "val_check_interval", "check_val_every_n_epoch", "eval_interval"),
        *("evaluation_strategy", "eval_strategy", "val_interval", "validate_every", "eval_freq", "test_every"),
    ),
    "use {eval_batch_size}": ("val_batch_size", "per_device_eval_batch_size", "test_batch_size", "valid_batch_size"),
    "use {best_metric} and {best_mode}": ("monitor", "metric_for_best_model", "greater_is_better"),
    "records are in the run's folder, and {tensorboard} writes scalars there: leave it out": (
        *("wandb", "use_wandb", "wandb_project", "logger", "mlflow", "report_to", "comet", "neptune", "log_with"),
        *("tracker", "project", "log_every", "log_interval", "logging_steps", "log_every_n_steps", "print_freq"),
    ),
    "use {quiet}": ("silent", "q", "no_progress", "progress_bar", "enable_progress_bar", "disable_tqdm", "log_level"),
    "use {show_spec}, which shows the settings and trains nothing": ("dry_run", "print_config", "n"),
    "use {samples} with a small number": ("fast_dev_run", "overfit_batches", "debug", "max_train_samples", "limit"),
    "an evaluation is `dure eval runs/NAME`": (
        "evaluate",
        "eval",
        "eval_only",
        "test_only",
        "do_eval",
        "test",
        "validate",
    ),
    "training is what `dure train` does: leave it out": ("do_train", "train", "mode"),
    "there is none yet: leave it out": ("early_stopping", "patience", "early_stopping_patience", "ema", "profiler"),
}
"""Sentence with settings in braces, and the names for which it is shown."""

_SENTENCES = {name: sentence for sentence, names in _PLACES.items() for name in names}


def place_of(name: str, known: Collection[str], spell: Callable[[str], str], *, has_task: bool = True) -> str | None:
    """Return the equivalent of another tool's setting; None for an unknown name, or one that is of no use here.

    Args:
        name: Name as it was written: `--per-device-batch-size`, `DURE_LR`.
        known: Settings that may be named, by their names in `RunSpec`.
        spell: Spells a setting as the caller would: `--nproc`, `nproc`, `DURE_NPROC`.
        has_task: False if no task is run, so that only a setting can be the equivalent.
    """
    plain = name.lower().removeprefix("dure_").lstrip("-").replace("-", "_").replace(".", "_")
    sentence = _SENTENCES.get(plain)
    if sentence is None:
        return None
    settings = [part.partition("}")[0] for part in sentence.split("{")[1:]]
    if not set(settings) <= {*known, "task"} or not (has_task or set(settings) - {"task"}):
        return None
    for setting in settings:
        word = f"--task.{plain.replace('_', '-')}" if setting == "task" else spell(setting)
        sentence = sentence.replace(f"{{{setting}}}", word)
    return sentence
