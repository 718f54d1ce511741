"""`fledge serve-target`: serve a target to trainers in other processes or on other machines."""

from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

from typer import Option

from fledge.cli.console import err, print_json, quiet_libraries
from fledge.cli.options import TrustRemoteCode
from fledge.core.errors import BadInput
from fledge.core.install import install_extra

EXAMPLE = (
    "Example: FLEDGE_TOKEN=... fledge serve-target --target Qwen/Qwen3-8B --host 0.0.0.0 "
    "--token-env FLEDGE_TOKEN\n\n"
    "Example: fledge train recipe.yaml target.backend=remote "
    "target.urls=[http://gpu1:8700] target.token_env=FLEDGE_TOKEN"
)


def serve_target(
    target: Annotated[str, Option(help="Directory, .gguf file, embedded name or hub id.")],
    engine: Annotated[str, Option(help="hf | sglang | vllm: what runs it.")] = "hf",
    aux_layer_ids: Annotated[
        str | None, Option(help="Three layers, as 1,15,28; default: 1, n/2 - 1, n - 4.")
    ] = None,
    dtype: Annotated[str, Option(help="Precision of the forward; auto: as stored.")] = "auto",
    device: Annotated[str, Option(help="auto | cpu | cuda | cuda:1 (hf).")] = "auto",
    compile_layers: Annotated[
        bool, Option("--compile/--no-compile", help="Compile its layers on a GPU (hf).")
    ] = True,
    engine_arg: Annotated[
        list[str] | None,
        Option("--engine-arg", metavar="NAME=VALUE", help="Passed to the engine as it is."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any free one.")] = 8700,
    token_env: Annotated[
        str | None, Option(help="Environment variable that holds the bearer token.")
    ] = None,
    insecure: Annotated[
        bool, Option("--insecure", help="Listen to a network without a token.")
    ] = False,
    max_requests: Annotated[int, Option(min=1, help="Requests held at once.")] = 64,
    max_tokens: Annotated[int, Option(min=1, help="Tokens of one request.")] = 262144,
    as_json: Annotated[
        bool, Option("--json", help="When ready, print address and facts as one JSON line.")
    ] = False,
) -> None:
    """Serve a target's hidden states to trainers (target.backend=remote), until SIGTERM."""
    if missing := [name for name in ("uvicorn", "httptools") if find_spec(name) is None]:
        raise BadInput(f"{', '.join(missing)} not installed", fix=install_extra("serve"))
    import yaml

    from fledge.core.machine import find_device
    from fledge.models.resolve import local_model
    from fledge.target.kinds import engine_section, kind_of
    from fledge.target.layers import EAGLE3_AUX_LAYERS
    from fledge.target.remote.client import token_from
    from fledge.target.remote.server.app import TargetServer
    from fledge.target.remote.server.run import Address, serve

    token, arguments = token_from(token_env), {}
    for text in engine_arg or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadInput(f"{text!r} is not NAME=VALUE", where="--engine-arg")
        arguments[name] = yaml.safe_load(value)
    address = Address(host, port)
    address.check(token=token, insecure=insecure)
    with address.bind() as bound:
        section = engine_section(
            engine,
            model=target,
            aux_layer_ids=aux_layer_ids,
            dtype=dtype,
            device=device,
            compile=compile_layers,
            trust_remote_code=trust_remote_code,
            engine_args=arguments,
        )
        quiet_libraries()
        err.say(f"loading {section.model}", style="cyan")
        layers = EAGLE3_AUX_LAYERS if section.aux_layer_ids is None else len(section.aux_layer_ids)
        server = TargetServer(
            kind_of(section).open(section, device=find_device(None), aux_layers=layers),
            model=section.model,
            engine=section.backend,
            model_dir=local_model(section.model, weights=False),
            token=token,
            max_requests=max_requests,
            max_tokens=max_tokens,
        )
        announce = partial(_announce, info=server.info, as_json=as_json)
        serve(server, address, bound, on_ready=announce)


def _announce(url: str, *, info: dict[str, Any], as_json: bool) -> None:
    facts = ("model", "engine", "aux_layer_ids", "dtype", "weights_fingerprint")
    if as_json:
        print_json({"url": url, **{name: info[name] for name in facts}}, one_line=True)
        return
    layers = ", ".join(map(str, info["aux_layer_ids"]))
    err.say(
        f"{info['model']} ({info['engine']}, {info['dtype']}, aux layers {layers}, weights "
        f"{info['weights_fingerprint']}) at {url}",
        style="cyan",
    )
