"""Launches as they are met in public: what is found in each, and what is not, and why not.

Every text is our own wording of a shape that READMEs, training scripts and bug reports have.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """`found` are the codes, `unknown` those that cannot be checked; `report` a public one.

    `missed` says what the launch also suffers from that reading it cannot show.
    """

    name: str
    text: str
    found: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    report: str = ""
    missed: str = ""


README_LINES = (
    Line(
        "nohup, unbuffered, to a fixed log",
        "nohup python -u train.py --lr 1e-3 > train_a.log 2>&1 &",
        ("DL004",),
    ),
    Line(
        "nohup with a tail behind it",
        "nohup python train.py > best.log 2>&1 &\ntail -f best.log",
        ("DL004", "DL011"),
    ),
    Line(
        "nohup and the launcher of torch, no 2>&1, nothing before &",
        "CUDA_VISIBLE_DEVICES=0,1 nohup python3 -m torch.distributed.launch"
        " --nproc_per_node=2 train.py --launcher pytorch > log.txt&",
        ("DL019", "DL004", "DL010"),
    ),
    Line(
        "nohup without a redirect, moved afterwards",
        "nohup python -u train.py --config-name sft loss=sft &\nmv nohup.out sft.log",
        (),
        missed="the move races with nohup's opening of nohup.out",
    ),
    Line(
        "the interpreter in a variable, output thrown away",
        'PYTHON=${PYTHON:-"python"}\n'
        'nohup $PYTHON -m torch.distributed.launch --nproc_per_node=$2 "$(dirname "$0")"/train.py'
        " ${@:3} >/dev/null 2>&1 &",
        ("DL019", "DL030"),
    ),
    Line(
        "a script that pipes into tee, into a directory of its own variable",
        "output_dir=runs/sft\n"
        "torchrun --nproc_per_node 8 train.py \\\n"
        "    --bf16 True \\\n"
        "    --report_to wandb \\\n"
        "    2>&1 | tee ${output_dir}/train.log\n",
        ("DL004", "DL006", "DL007"),
    ),
    Line(
        "the same with mkdir",
        "output_dir=runs/sft\n"
        "mkdir -p ${output_dir}\n"
        "torchrun --nproc_per_node 8 train.py --bf16 True 2>&1 | tee ${output_dir}/train.log\n",
        ("DL004", "DL007"),
    ),
    Line(
        "tmux that runs the program directly",
        'tmux new-session -d -s training "python train.py"\ntmux attach -t training',
        ("DL030", "DL021"),
    ),
    Line(
        "tmux with a sleep behind, so that the session stays",
        'tmux new-session -d -s train "bash run.sh 2>&1 | tee train.log; echo done; sleep 86400"',
        ("DL004", "DL007", "DL005"),
    ),
    Line(
        "ssh with a here-document that starts tmux",
        "ssh -tt -i key pod << 'EOF'\n"
        "source /workspace/.bashrc_pod 2>/dev/null\n"
        "tmux new-session -d -s train 'python offline.py --env-id A > /results/train.log 2>&1'\n"
        "echo started\n"
        "exit\n"
        "EOF",
        ("DL004", "DL011", "DL021"),
        ("DL001", "DL020", "DL029"),
    ),
    Line(
        "screen with bash -c",
        'screen -dmS training bash -c "CUDA_VISIBLE_DEVICES=1,2 torchrun --nproc_per_node=2'
        ' train.py --batch-size 4 2>&1 | tee training.log"',
        ("DL004", "DL007", "DL005"),
    ),
    Line(
        "a hook of conda inside screen",
        "screen -dmS cvm bash -lc '\n"
        "  source ~/miniconda3/etc/profile.d/conda.sh\n"
        "  conda activate cvm\n"
        "  python run.sh 2>&1 | tee log/cvm.log'",
        ("DL004", "DL006", "DL011", "DL007", "DL005"),
    ),
    Line(
        "ssh, nohup, setsid, stdin closed",
        'ssh "$HOST" "nohup setsid python3 serve.py --port $PORT > /tmp/serve.log 2>&1'
        ' < /dev/null &" || true',
        ("DL004", "DL011"),
        ("DL001", "DL029"),
    ),
    Line(
        "srun that runs variables",
        'export LAUNCHER="torchrun --nnodes $SLURM_NNODES"\n'
        'export CMD="train.py --data $DATA"\n'
        "srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'"
        " 2>&1 | tee -a $LOGS/main.txt",
        ("DL007",),
        ("DL006",),
    ),
    Line(
        "echo and ps of $! in a loop",
        "nohup python -u train.py --gpu 2 > search.out &\n"
        "echo $!\n"
        "while ps -p $!; do sleep 30s; done",
        ("DL004", "DL010"),
    ),
    Line(
        "a loop of runs in the background",
        "mkdir -p out\n"
        "for seed in 1 2 3; do\n"
        "  CUDA_VISIBLE_DEVICES=$seed python train.py --seed $seed > out/$seed.log 2>&1 &\n"
        "done\n"
        "wait",
        ("DL011",),
    ),
)

REPORTS = (
    Line(
        "PYTHONUNBUFFERED is 0",
        'docker run --rm -e PYTHONUNBUFFERED="0" trainer python train.py 2>&1 | tee -a train.log',
        ("DL011", "DL012", "DL007", "DL027"),
        ("DL029",),
        report="kubeflow/trainer#1635",
        missed="there it stands in a pod's specification: the same variable, but not a shell's",
    ),
    Line(
        "PYTHONBUFFERED is not its name",
        "export PYTHONBUFFERED=16\npython3 train.py 2>&1 | tee -a train.log",
        ("DL011", "DL012", "DL007"),
        report="radixark/miles_diffusion#213",
    ),
    Line(
        "tee hides a crash",
        "python -u train.py 2>&1 | tee -a train.log && echo trained",
        ("DL007",),
        report="ai2cm/fv3net#664",
    ),
    Line(
        "an empty log, because of the buffer",
        "python train.py -k cpn -lr 4e-5 &>> 9f.log",
        ("DL011",),
        report="zczcwh/PoseFormer#28",
    ),
    Line(
        "the launcher dies of SIGHUP under nohup",
        "nohup accelerate launch --num_processes 2 train.py --bf16 >> sft.log 2>&1 &",
        ("DL019",),
        report="hiyouga/LlamaFactory#3036",
    ),
    Line(
        "docker exec: the redirect is the host's, where the directory is missing",
        "docker exec trainer python -u train.py >> /dbdata/train.log 2>&1",
        ("DL001", "DL027"),
        ("DL029",),
        report="moby/moby#17818",
    ),
    Line(
        "lxc exec: no shell reads the quoted word",
        "lxc exec trainer -- 'python -u train.py >> /tmp/train.log 2>&1'",
        ("DL028",),
        report="canonical/lxd#3054",
    ),
    Line(
        "tmux: the session is gone before anything is typed",
        "tmux new-session -d -s job 'cd /srv'\n"
        "tmux send-keys -t job 'python -u train.py >> /tmp/train.log 2>&1' Enter",
        ("DL035",),
        report="tmux/tmux#2410",
    ),
)

NOT_CAUGHT = {
    "ultralytics/ultralytics#918": "nohup again, but the launcher is started inside the program",
    "GaTech-RL2/EgoVerse#682": "orphans that hold GPUs: seen by looking at processes, not launches",
    "Datura-ai/lium-io#1140": "a busy GPU without a process: the same",
    "sgl-project/sglang#7553": "py-spy is not found when a watchdog fires: no launch is wrong",
    "marin-community/marin#4529": "py-spy may not trace: a matter of privileges at run time",
    "benfred/py-spy#390": "py-spy leaves the process stopped: the same",
    "pytorch/pytorch#149739": "SIGKILL leaves no log: it depends on the program's own error file",
}
