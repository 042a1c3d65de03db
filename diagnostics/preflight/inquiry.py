"""What only torch and transformers can answer about a run: asked in a child process."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 300.0
GONE_S = 5.0
SHOWN_ERROR = 400
# One JSON object a line and subject. Weights are not loaded: the drafter is made of shapes only.
CHILD = """
import json, logging, math, sys
from pathlib import Path
def say(subject, **told):
    print(json.dumps({"subject": subject, **told}), flush=True)
def asked(subject, ask):
    try:
        say(subject, **ask())
        return True
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if not hasattr(error, "remedy") else str(error)
        say(subject, error=said, remedy=getattr(error, "remedy", ""))
logging.disable(logging.CRITICAL)
from dflash.config import TrainConfig
from dflash.data.completions import Completions
from dflash.drafter import Drafter
from dflash.errors import ModelError
from dflash.prefetch import open_source
from dflash.resolve import drafter_shape, missing_kernels
from dflash.rundir import RunDirectory
from dflash.steps import StepPlan
from dflash.target_files import load_text_config, load_tokenizer
import torch
config = TrainConfig.from_toml(Path(sys.argv[1]))
path, trusted = config.model.target_model, config.model.trust_remote_code
found = {}
def target():
    text = load_text_config(path, trust_remote_code=trusted)
    tokenizer = load_tokenizer(path, trust_remote_code=trusted)
    if 2 * len(tokenizer) < text.vocab_size:  # without its files transformers makes up an empty one
        raise ModelError(f"--target-model {path}: the tokenizer has {len(tokenizer)} tokens, the"
                         f" model {text.vocab_size}: its files are missing or another model's",
                         remedy=f"Copy tokenizer.json and its like to {path}.")
    found["shape"] = drafter_shape(config)
    return {"kind": text.model_type, "layers": text.num_hidden_layers, "hidden": text.hidden_size,
            "tokens": len(tokenizer),
            "missing": missing_kernels(text, config.devices.target_gpus)}
def data():
    rows = Completions(config.data.data_dir)
    ends = [len(rows.completion(row).input_ids) for row in (0, len(rows) - 1)] if len(rows) else []
    shape = found.get("shape")
    if shape is None:
        return {"rows": len(rows), "ends": ends, "steps": None}
    source = open_source(config, mask_token_id=shape.mask_token_id, vocab_size=shape.vocab_size)
    plan = StepPlan.of(len(source.plan), drafters=len(config.devices.drafter_gpus),
                       grad_accum=config.optimizer.grad_accum, first_step=0)
    found["steps"] = plan.total_steps
    return {"rows": len(rows), "ends": ends, "steps": plan.total_steps}
def space():
    with torch.device("meta"):
        count = sum(each.numel() for each in Drafter(found["shape"]).parameters())
    # bfloat16 for serving; the float32 weight and AdamW's two moments for resuming
    saves = math.ceil(found["steps"] / config.run.save_interval)
    return {"bytes": count * (2 + 3 * 4), "saves": saves,
            "kept": min(saves, config.run.keep_checkpoints or saves)}
def resume():
    state = RunDirectory(Path(config.run.output_dir), config, None).resume_from()
    return {"from": state and str(state.directory)}
asked("target", target)
asked("data", data)
asked("resume", resume)
if "shape" in found and "steps" in found:
    asked("space", space)
"""
Answer = dict[str, Any]


class NoAnswer(Exception):
    """The child could not be asked, or did not end in time; the message says why."""


def ask(config: Path, progress: Callable[[str], None]) -> dict[str, Answer]:
    """What there is to say, by subject: target, data, resume, space. Raises NoAnswer.

    Args:
        progress: is told each subject that is done.
    """
    command = [sys.executable, "-c", CHILD, str(config)]
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *_python_path()])}
    # Without GPUs: it must not add a context to one that it is asked about.
    environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as child:
        late = threading.Timer(LIMIT_S, child.kill)
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True)
        late.start()
        reader.start()
        try:
            answers = _answers(child, progress)
            child.wait(GONE_S)
        except subprocess.TimeoutExpired:
            pass  # killed below
        finally:
            late.cancel()
            child.kill()
        reader.join(GONE_S)
    if not answers:
        raise NoAnswer(_why(child.returncode, errors))
    return answers


def _answers(child: "subprocess.Popen[str]", progress: Callable[[str], None]) -> dict[str, Answer]:
    answers = {}
    for line in child.stdout or ():
        try:
            answer = json.loads(line)
            answers[answer.pop("subject")] = answer
        except (ValueError, KeyError, AttributeError, TypeError):
            continue  # a library's own words
        progress(next(reversed(answers)))
    return answers


def _python_path() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def _why(status: int, errors: list[str]) -> str:
    last = next((line.strip() for line in reversed(errors) if line.strip()), "")
    if "No module named 'torch'" in last or "No module named 'transformers'" in last:
        return f"{last}: it takes the extra dflash-diag[train]"
    if status < 0 and not last:
        return f"the child was ended by signal {-status}, after {LIMIT_S:g} s at most"
    return last[:SHOWN_ERROR] or f"the child ended with status {status} and without a word"
