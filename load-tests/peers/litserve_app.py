"""LitServe: POST /predict."""
import litserve

import v2


class Api(litserve.LitAPI):
    def setup(self, device):
        self.session = v2.load()

    def decode_request(self, request, **_):
        return v2.decode(request)

    def batch(self, inputs):
        return inputs

    def predict(self, batch, **_):
        return v2.run_batch(self.session, batch)

    def unbatch(self, output):
        return output

    def encode_response(self, output, **_):
        return v2.encode(output)


if __name__ == "__main__":
    api = Api(max_batch_size=v2.MAX_BATCH, batch_timeout=v2.DELAY_SECONDS)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=v2.INSTANCES, timeout=60)
    server.run(host="127.0.0.1", port=v2.PORT, generate_client_file=False, log_level="warning")
