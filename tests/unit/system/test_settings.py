"""Which variables are stored, and what of them."""

from __future__ import annotations

from argus.system.settings import settings


def test_settings_are_stored_and_nothing_else() -> None:
    facts = settings(
        [
            ("NCCL_ALGO", "Ring"), ("HOME", "/root"), ("", "x"), ("NCCL_TEXT", "a\nb"), ("NCCL_" + "A" * 9000, "1"),
            ("AWS_SECRET_ACCESS_KEY", "hunter2"), ("NCCL_AUTH_TOKEN", "hunter2"), ("CUDA_PROXY", "http://u:hunter2@p:1"),
            ("TORCH_HUB_PW", "hunter2"), ("NCCL_NET_CRED", "hunter2"), ("NCCL_IB_PKEY", "7"),
            ("UCX_OPTS", "a=1,pw=hunter2"),
        ]
    )  # fmt: skip
    assert facts == {
        "env.NCCL_ALGO": "Ring", "env.NCCL_AUTH_TOKEN": "***", "env.CUDA_PROXY": "http://u:***@p:1",
        "env.TORCH_HUB_PW": "***", "env.NCCL_NET_CRED": "***", "env.NCCL_IB_PKEY": "7", "env.UCX_OPTS": "a=1,pw=***",
    }  # fmt: skip


def test_the_image_is_what_a_variable_of_the_container_names() -> None:
    assert settings([("CONTAINER_IMAGE", "reg/train:24.10")]) == {"container.image": "reg/train:24.10"}
    assert settings([("CONTAINER_IMAGE", "https://u:hunter2@reg/train")]) == {
        "container.image": "https://u:***@reg/train"
    }
    assert settings([("CONTAINER_IMAGE", "")]) == {}


def test_that_argus_armed_a_process_is_no_setting_of_the_job() -> None:
    name = "CUDA_INJECTION64_PATH"
    assert settings([(name, "/opt/argus/argus/cupti/libargus_cupti.so")]) == {}
    assert settings([(name, "/opt/nsight/libToolsInjection64.so")]) == {
        f"env.{name}": "/opt/nsight/libToolsInjection64.so"
    }
