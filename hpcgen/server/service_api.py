"""`/v1/models`, `/health` and `/metrics`."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

from hpcgen.server.access import Access, get_access
from hpcgen.server.api_errors import not_found
from hpcgen.server.objects import ErrorResponse, Health, ModelList, ModelObject
from hpcgen.server.store import Store

router = APIRouter(tags=["service"])
Caller = Annotated[Access, Depends(get_access)]
_MISSING: dict[int | str, dict[str, Any]] = {404: {"model": ErrorResponse}}


@router.get("/health", response_model=Health)
def health() -> Health:
    """Answers while the server does; needs no token."""
    return Health()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(access: Caller) -> Response:
    """Numbers for Prometheus, over all tokens."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(access.store))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", response_model=ModelList)
def list_models(access: Caller) -> ModelList:
    return ModelList(data=[_model(access)])


@router.get("/v1/models/{model:path}", response_model=ModelObject, responses=_MISSING)
def get_model(access: Caller, model: str) -> ModelObject:
    if model != access.server.model:
        raise not_found("model", model)
    return _model(access)


def _model(access: Access) -> ModelObject:
    return ModelObject(id=access.server.model, created=access.server.started)


class StoreCollector:
    """Prometheus metrics made from the store when they are asked for: they survive restarts."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        batches = GaugeMetricFamily("hpcgen_batches", "Batches by status.", labels=["status"])
        for status, count in sorted(self._store.batch_counts().items()):
            batches.add_metric([status], count)
        yield batches
        requests = CounterMetricFamily("hpcgen_requests", "Requests that have ended, by outcome.", labels=["outcome"])
        for outcome, count in zip(("completed", "failed"), self._store.request_counts(), strict=True):
            requests.add_metric([outcome], count)
        yield requests
        engine = self._store.engine()
        if engine is not None:
            yield GaugeMetricFamily("hpcgen_sequences", "Sequences in the engine.", engine.sequences)
            yield GaugeMetricFamily(
                "hpcgen_engine_updated_seconds", "When the engine last reported.", engine.updated_at
            )
            yield CounterMetricFamily("hpcgen_prefill_tokens", "Since the engine's start.", engine.prefill_tokens)
            yield CounterMetricFamily("hpcgen_decode_tokens", "Since the engine's start.", engine.decode_tokens)
