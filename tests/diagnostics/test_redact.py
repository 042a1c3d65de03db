"""Secrets in quoted text: what is hidden, and what every log is full of and stays."""

import pytest

from diagnostics.redact import redact, redact_all, redact_command, redact_mapping


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pip --index-url https://me:s3cret@pypi.invalid/simple", "https://***@pypi.invalid"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "HF_TOKEN=***"),
        ("posting with hf_abcdefghijklmnopqrst", "posting with ***"),
        ("WANDB_API_KEY=0123456789abcdef", "WANDB_API_KEY=***"),
        ("--api-key 0123456789abcdef --lr 1e-4", "--api-key *** --lr 1e-4"),
        ('{"password": "hunter2", "port": 1}', '{"password": "***", "port": 1}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("authorization: basic dXNlcg==", "authorization: basic ***"),
        ("db_password='x y' lr=1", "db_password='***' lr=1"),
        ("--password 'hunter2 s3cret' --lr 1", "--password '***' --lr 1"),
        ("env 'DB_PASSWORD=hunter2;s3cret&2' python", "env 'DB_PASSWORD=***' python"),
        ("curl -H 'Authorization: Bearer hunter2 s3cret'", "-H 'Authorization: Bearer ***'"),
        ("PGPASSWORD=hunter2 dbPassword=s3cret", "PGPASSWORD=*** dbPassword=***"),
        ('{"clientSecret": "hunter2, s3cret", "port": 1}', '{"clientSecret": "***", "port": 1}'),
        (r'"{\"password\": \"hunter2\", 1}"', r'"{\"password\": \"***\", 1}"'),
        ("accessToken=0123456789abcdef", "accessToken=***"),
        ("--token 12ab34cd56ef", "--token ***"),
        ("key AKIAABCDEFGHIJKLMNOP", "key ***"),
        ("sk-abcdefghijklmnop1234", "***"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "***"),
    ],
)
def test_a_secret_is_hidden(text, shown):
    assert shown in redact(text)
    secrets = ("s3cret", "hunter2", "hf_abc", "0123456789abcdef", "dXNlcg")
    assert not [secret for secret in secrets if secret in redact(text)]


@pytest.mark.parametrize(
    "text",
    [
        "tokens/s 123456.7 token_budget=1048576 num_tokens: 4096",
        "pad_token='<|endoftext|>' mask_token_id=151669 eos_token=</s>",
        "PWD=/srv/app OLDPWD=/srv",
        "the password was wrong, the author is unknown, a secret of success",
        "https://files.invalid/a@b.whl user@host:/srv",
        "key=value, monkey: banana, keyboard: qwerty",
        'File "/srv/app/tokenizer.py", line 3, in token_of',
    ],
)
def test_ordinary_words_stay(text):
    assert redact(text) == text


def test_a_value_is_hidden_for_its_name():
    secret = ("MY_SECRET", "HF_TOKEN", "api_key", "PGPASSWORD", "clientSecret")
    values = dict.fromkeys(secret, "word") | {"tokens": "12"}
    hidden = redact_mapping({**values, "url": "http://a:b@c"})
    assert hidden == dict.fromkeys(secret, "***") | {
        "tokens": "12",
        "url": "http://***@c",
    }


def test_all_texts_are_redacted_however_deep_and_names_too():
    deep = {"a": [{"url http://a:b@c": ("--password x", 1, None, True)}], "HF_TOKEN": "word"}
    hidden = {"a": [{"url http://***@c": ["--password ***", 1, None, True]}], "HF_TOKEN": "***"}
    assert redact_all(deep) == hidden


def test_a_command_is_redacted_before_it_is_quoted():
    words = ["x", "--password", "it's hunter2", "DB_PASSWORD=hunter2; 'n", "--lr", "1e-4", "a b"]
    assert redact_command(words) == "x --password *** 'DB_PASSWORD=***' --lr 1e-4 'a b'"
    inner = ["bash", "-c", "HF_TOKEN=hf_abcdefghijklmnopqrst python train.py"]
    assert redact_command(inner) == "bash -c 'HF_TOKEN=*** python train.py'"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["ssh", "host", "export HF_TOKEN=0123456789abcdef; cd /x && python train.py"],
            "ssh host 'export HF_TOKEN=***; cd /x && python train.py'",
        ),
        (
            ["tmux", "new-session", "API_KEY=hunter2 python -u train.py --lr 3 >> /x/t.log"],
            "tmux new-session 'API_KEY=*** python -u train.py --lr 3 >> /x/t.log'",
        ),
        (["su", "--command", "A_TOKEN=x bash a.sh"], "su --command 'A_TOKEN=x bash a.sh'"),
        (["x", "--use_auth_token", "--output_dir", "/out"], "x --use_auth_token --output_dir /out"),
        (["x", "--eos_token", "<|im_end|>"], "x --eos_token '<|im_end|>'"),
        (["x", "--password", "--lr", "1"], "x --password --lr 1"),
    ],
)
def test_the_rest_of_a_command_stays(words, shown):
    assert redact_command(words) == shown


def test_long_text_takes_no_time():
    assert redact("a_-" * 100_000) == "a_-" * 100_000
