// k6 run --no-usage-report -e SCENARIO=below -e CAPACITY=140 [-e URL=http://127.0.0.1:8000] [-e MODEL=minilm] [-e SECONDS=20] infer.js
//
// An open loop: requests start at a constant rate whatever the server does. CAPACITY is rows per second, as a closed loop or
// `concertina profile` says. Scenarios: below (0.7 of it), at, above (1.5), mixed (0.5, rows of many lengths), squeeze (0.5, and
// the memory limit falls to LIMIT in the middle; needs TOKEN). Each has its thresholds: k6 exits with 99 if one is crossed, or if it
// could not offer 98% of what the scenario says.
import http from "k6/http";
import { check } from "k6";
import { Counter, Trend } from "k6/metrics";

const scenario = __ENV.SCENARIO || "below";
const url = __ENV.URL || "http://127.0.0.1:8000";
const model = __ENV.MODEL || "minilm";
const capacity = parseFloat(__ENV.CAPACITY || "100");
const seconds = parseInt(__ENV.SECONDS || "20");
const share = { below: 0.7, at: 1, above: 1.5, mixed: 0.5, squeeze: 0.5 }[scenario];
const lengths = scenario === "mixed" ? [8, 16, 32, 64, 128] : [64];

const refused = new Counter("refused"); // answered 503 or 504: the queue is full, or the deadline would not be met
const broken = new Counter("broken"); // anything else that is not 200, and connections that fail
const answered = new Trend("answered", true); // latency of the answers only

const rate = capacity * share;

const thresholds = {
  below: { broken: ["count==0"], refused: ["count==0"], answered: ["p(99)<1000"] },
  // At capacity a queue grows by chance; beyond it, by necessity, and then the server must say so in time.
  at: { broken: ["count==0"], answered: ["p(50)<30000"] },
  above: { broken: ["count==0"], answered: ["max<31000"] },
  mixed: { broken: ["count==0"], refused: ["count==0"] },
  squeeze: { broken: ["count==0"], refused: ["count==0"], answered: ["p(99)<5000"] },
};

// Each request that waits for its answer keeps a virtual user. One that k6 has to make first comes too late, and its request is
// dropped: what was offered is then less than the scenario says, which must not pass for it.
const users = Math.min(2048, Math.max(64, Math.ceil(rate * Math.min(seconds, 12))));
thresholds[scenario].dropped_iterations = [`count<${Math.ceil(0.02 * rate * seconds)}`];

const arrivals = { executor: "constant-arrival-rate", rate: Math.max(1, Math.round(rate * 10)), timeUnit: "10s",
  duration: `${seconds}s`, preAllocatedVUs: users, maxVUs: 4096, exec: "infer" };
const scenarios = { arrivals };
if (scenario === "squeeze") {
  scenarios.limit = { executor: "shared-iterations", vus: 1, iterations: 1, startTime: `${seconds / 2}s`, exec: "squeeze" };
}

export const options = { scenarios, thresholds: thresholds[scenario], summaryTrendStats: ["min", "med", "p(90)", "p(99)", "max"] };

function tensor(name, length, value) {
  return { name, datatype: "INT64", shape: [1, length], data: Array.from({ length }, value) };
}

function body(length) {
  if (model === "magika") {
    return { inputs: [{ name: "bytes", datatype: "INT32", shape: [1, 2048], data: Array.from({ length: 2048 }, (_, i) => i % 256) }] };
  }
  return { inputs: [
    tensor("input_ids", length, (_, i) => 1000 + i), tensor("attention_mask", length, () => 1), tensor("token_type_ids", length, () => 0),
  ], outputs: [{ name: "sentence_embedding" }] };
}

const bodies = lengths.map((length) => JSON.stringify(body(length)));
const headers = { "Content-Type": "application/json" };

export function infer() {
  const response = http.post(`${url}/v2/models/${model}/infer`, bodies[Math.floor(Math.random() * bodies.length)], { headers, timeout: "60s" });
  const fine = check(response, { "has outputs": (r) => r.status === 200 && r.body.includes('"outputs"') });
  if (fine) answered.add(response.timings.duration);
  else if (response.status === 503 || response.status === 504) refused.add(1);
  else broken.add(1);
}

export function squeeze() {
  const limit = JSON.stringify({ limit: __ENV.LIMIT || "256MiB" });
  const response = http.post(`${url}/admin/memory`, limit, { headers: { Authorization: `Bearer ${__ENV.TOKEN}` } });
  check(response, { "the limit is set": (r) => r.status === 200 });
  if (response.status !== 200) broken.add(1);
}
