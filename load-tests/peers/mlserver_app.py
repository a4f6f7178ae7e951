"""MLServer: a runtime of ours behind its own routes and its own batching."""
import mlserver
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

import v2


class Model(mlserver.MLModel):
    async def load(self):
        self.session = v2.load()
        self.names = [v2.OUTPUT]
        return True

    async def predict(self, payload):
        arrays = {entry.name: NumpyCodec.decode_input(entry) for entry in payload.inputs}
        results = zip(self.names, self.session.run(self.names, arrays))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output(*result) for result in results])
