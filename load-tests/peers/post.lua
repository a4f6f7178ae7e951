-- wrk -s post.lua URL BODY [LENGTH-OF-JSON-HEAD]: posts one body again and again, and ends with one line of JSON.

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  wrk.method, wrk.body = "POST", file:read("*a")
  file:close()
  wrk.headers["Content-Type"] = arguments[2] and "application/octet-stream" or "application/json"
  if arguments[2] then wrk.headers["Inference-Header-Content-Length"] = arguments[2] end
  request = (function(whole) return function() return whole end end)(wrk.format())
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format('{"requests": %d, "seconds": %.6f, "p50": %.6f, "p99": %.6f, "failed": %d}\n',
    summary.requests - errors.status, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
