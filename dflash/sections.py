"""The sections of the configuration: each is a group of `dflash train --help`, a table in TOML.

A field is an option of the same name with dashes; its metadata is all that help and checks need.
"""

import dataclasses

from dflash.fields import Section, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Target model and drafter"""

    target_model: str = option(help="directory of the frozen Hugging Face causal LM", unit="path")
    init_from: str | None = option(
        None,
        help="start from the weights of this checkpoint, of this trainer, z-lab or speculators",
        unit="path",
    )
    num_draft_layers: int = option(5, help="layers of the drafter", unit="layers", at_least=1)
    block_size: int = option(
        16, help="slots of a draft block, the anchor included", unit="slots", at_least=2
    )
    target_layer_ids: tuple[int, ...] | None = option(
        None,
        help="target layers whose hidden states are the drafter's context, such as 1,9,17 "
        "(without it: spread over the target)",
        unit="layers",
    )
    mask_token_id: int | None = option(
        None,
        help="token that fills the slots to draft (without it: the tokenizer's mask token)",
        unit="token id",
        at_least=0,
    )
    sliding_window: int = option(
        0,
        help="attention window of all draft layers but the last; 0 is full attention",
        unit="tokens",
        at_least=0,
    )
    dtype: str = option(
        "auto",
        help="dtype of weights and activations; auto is bfloat16 where the device has it",
        choices=("auto", "bfloat16", "float32"),
    )
    trust_remote_code: bool = option(
        False, help="run Python code that the target's directory brings along"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Data and batching"""

    data_dir: str = option(help="directory of the tokenized completions (Arrow)", unit="path")
    token_budget: int = option(
        49152, help="most tokens of a micro-batch, padding included", unit="tokens", at_least=2
    )
    max_seq_len: int = option(
        8192, help="longer documents are cut to this length", unit="tokens", at_least=2
    )
    max_batch_size: int = option(64, help="most rows of a micro-batch", unit="rows", at_least=1)
    num_prefetch_threads: int = option(
        4, help="threads that read and collate batches", unit="threads", at_least=1
    )
    seed: int = option(
        0,
        help="fixes initial weights, batch order, anchors and noise",
        unit="number",
        at_least=0,
        below=2**32,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesConfig(Section):
    """Devices: one thread for each device named; a device may be named several times"""

    target_gpus: tuple[str, ...] = option(
        ("cuda:0",), help="where the target runs: 0,1 or cuda:0,cuda:1 or cpu", unit="devices"
    )
    drafter_gpus: tuple[str, ...] = option(
        ("cuda:0",), help="where the drafter trains, one replica for each", unit="devices"
    )

    compile: str = option(
        "auto",
        help="compile the layers of drafters and targets, each in its own thread, with this "
        "backend of torch.compile; auto is inductor where the drafters are on GPUs, else none",
        choices=("auto", "none", "inductor", "aot_eager"),
    )
    draft_chunk: int = option(
        16384,
        help="most draft positions that run at once in compiled layers; bounds the memory",
        unit="slots",
        at_least=2,
    )
    cuda_graphs: str = option(
        "auto",
        help="replay the drafter's passes as CUDA graphs; auto measures whether that is faster",
        choices=("auto", "on", "off"),
    )
    late_compile: str = option(
        "refuse",
        help="what becomes of a compile after the start: an error, or a delay",
        choices=("refuse", "allow"),
    )

    @property
    def all_cpu(self) -> bool:
        """Whether no stage runs on a GPU."""
        return set(self.target_gpus + self.drafter_gpus) == {"cpu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Section):
    """Objective"""

    gamma: float = option(
        7.0, help="decay of the loss over a block's slots: exp(-(k-1)/gamma)", unit="slots", above=0
    )
    max_anchors: int = option(
        512, help="most anchors drawn from one document", unit="anchors", at_least=1
    )
    max_draft_positions: int = option(
        65536,
        help="most anchors x block-size of a micro-batch: bounds the drafter's memory",
        unit="slots",
        at_least=2,
    )
    noise_start: float = option(
        0.0, help="noise on the context features at the first step", unit="scale", at_least=0
    )
    noise_end: float = option(
        0.0, help="noise on the context features at the last step", unit="scale", at_least=0
    )
    noise_type: str = option(
        "uniform", help="distribution of the noise", choices=("uniform", "gaussian")
    )
    use_soft_labels: bool = option(False, help="add the KL divergence to the target's distribution")
    kl_weight: float = option(
        0.15, help="weight of the KL part, with --use-soft-labels", unit="weight", at_least=0
    )
    kl_temperature: float = option(
        2.0, help="softens both distributions of the KL part", unit="temperature", above=0
    )
    cap_lambda: float = option(
        0.0,
        help="weight of the entropy of correctly predicted tokens (CAP); 0 is off",
        unit="weight",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Optimizer: AdamW, linear warm-up, then cosine"""

    epochs: int = option(6, help="passes over the data", unit="epochs", at_least=1)
    lr: float = option(6e-4, help="peak learning rate", unit="rate", above=0)
    warmup_ratio: float = option(
        0.04, help="part of all steps spent warming up", unit="fraction", at_least=0, below=1
    )
    weight_decay: float = option(0.01, help="decoupled weight decay", unit="rate", at_least=0)
    grad_accum: int = option(
        1, help="micro-batches of each drafter in one step", unit="batches", at_least=1
    )
    grad_clip: float = option(
        1.0, help="largest gradient norm; 0 is no clipping", unit="norm", at_least=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """Evaluation during training: acceptance length by replay"""

    eval_every: int = option(
        0, help="steps between two evaluations; 0 is never", unit="steps", at_least=0
    )
    eval_data: str | None = option(
        None,
        help="directory of held-out tokenized completions, greedy ones of the target",
        unit="path",
    )
    eval_rows: int = option(
        64, help="most rows of --eval-data that are replayed", unit="rows", at_least=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Run, checkpoints and time limits"""

    output_dir: str = option(help="directory for checkpoints, logs and the config", unit="path")
    save_interval: int = option(
        2000, help="steps between two checkpoints", unit="steps", at_least=1
    )
    keep_checkpoints: int = option(
        0, help="newest checkpoints that are kept; 0 keeps all", unit="count", at_least=0
    )
    resume: str = option(
        "never",
        help="never, auto (the newest complete checkpoint) or a checkpoint's path",
        unit="mode or path",
    )
    queue_capacity: int = option(
        1, help="batches that may wait in a channel", unit="batches", at_least=1
    )
    start_timeout_s: float = option(
        1800.0, help="limit for loading, compiling and warming up", unit="seconds", above=0
    )
    stall_timeout_s: float = option(
        600.0, help="limit for one unit of work after the start", unit="seconds", above=0
    )
    stop_grace_s: float = option(
        10.0, help="limit for threads to end once told to", unit="seconds", above=0
    )
    on_stuck: str = option(
        "abort",
        help="what the watchdog does about a loop that is past its limit, once it has written all "
        "stacks: end the run, or only say so; off starts no watchdog",
        choices=("abort", "dump", "off"),
    )
    replica_check_interval: int = option(
        100, help="steps between two checks that replicas are equal", unit="steps", at_least=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """Logging"""

    log_format: str = option(
        "auto",
        help="bar for a terminal, lines for a file; auto looks at stderr",
        choices=("auto", "bar", "lines"),
    )
    log_interval: int = option(10, help="steps between two plain lines", unit="steps", at_least=1)
    spike_ratio: float = option(
        3.0,
        help="warn about a loss that is this many times the median of the steps before it",
        unit="ratio",
        above=1,
    )
    wandb_project: str | None = option(
        None, help="log to this Weights & Biases project", unit="name"
    )
    wandb_run_name: str | None = option(None, help="name of the run there", unit="name")
    tensorboard: bool = option(False, help="write TensorBoard events under the output directory")
