"""BentoML: POST /predict with {"bodies": [...]}; it batches over the list."""
import bentoml

import v2


@bentoml.service(workers=v2.INSTANCES, traffic={"timeout": 60, "max_concurrency": 4096}, metrics={"enabled": False},
                 logging={"access": {"enabled": False}})
class Model:
    def __init__(self):
        self.session = v2.load()

    @bentoml.api(batchable=True, max_batch_size=v2.MAX_BATCH, max_latency_ms=60000)
    def predict(self, bodies: list[dict]) -> list[dict]:
        return [v2.encode(answer) for answer in v2.run_batch(self.session, [v2.decode(body) for body in bodies])]
