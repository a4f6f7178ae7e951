"""Mosec: POST /inference."""
import mosec

import v2


class Model(mosec.Worker):
    def __init__(self):
        super().__init__()
        self.session = v2.load()

    def forward(self, data):
        return [v2.encode(answer) for answer in v2.run_batch(self.session, [v2.decode(body) for body in data])]


if __name__ == "__main__":
    server = mosec.Server()
    server.append_worker(Model, num=v2.INSTANCES, max_batch_size=v2.MAX_BATCH,
                         max_wait_time=max(1, round(v2.DELAY_SECONDS * 1000)))
    server.run()
