"""The Hub's refusals in a few words that are safe to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tunewatch.finetune.errors import AuthError, ConfigError, HubError, JobError


@contextmanager
def explain_hub_errors(kind: str, name: str) -> Iterator[None]:
    """Turn the Hub's errors about a model or dataset into `AuthError`, `ConfigError` or `HubError`.

    transformers and datasets wrap them in OSError and others, so the whole chain of causes is looked at.
    Errors that have nothing to do with the Hub pass unchanged.
    """
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        explained = explain(error, kind, name)
        if explained is None:
            raise
        raise explained from error


def explain(error: BaseException, kind: str, name: str) -> JobError | None:
    """What an error of the Hub means, or None when it is not one."""
    from huggingface_hub import errors

    gated = AuthError(f"{kind} {name} is gated: accept its terms on the Hub, then set HF_TOKEN")
    unknown = ConfigError(
        f"no {kind} {name!r} on the Hub and no such local folder (private ones need HF_TOKEN)",
        key=f"{kind}.{'name' if kind == 'model' else 'path'}",
    )
    no_revision = ConfigError(f"{kind} {name} has no such revision", key=f"{kind}.revision")
    for link in _chain(error):
        status = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(link, errors.GatedRepoError):
            return gated
        if isinstance(link, errors.RevisionNotFoundError):
            return no_revision
        if isinstance(link, errors.RepositoryNotFoundError):
            return unknown
        if type(link).__name__ == "DatasetNotFoundError":  # of datasets, which drops the cause
            return gated if "gated" in str(link) else no_revision if "Revision" in str(link) else unknown
        if isinstance(link, errors.HFValidationError):
            return ConfigError(f"{name!r} is neither a local path nor a Hub id", key=kind)
        if status in (401, 403):
            return AuthError(f"the Hub refuses access to {kind} {name} (HTTP {status}): set HF_TOKEN")
    for link in _chain(error):
        unreachable = errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError
        if isinstance(link, unreachable | ConnectionError) or type(link).__name__ in (
            "ConnectError",
            "ConnectTimeout",
        ):
            return HubError(f"{kind} {name} is not on this machine and the Hub cannot be reached")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(12):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__
