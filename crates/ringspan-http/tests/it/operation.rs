//! Tests of the routes for operators, and of adapters.

use crate::client::{read, start};
use serde_json::json;

#[test]
fn metrics_have_the_names_of_dashboards() {
    let server = start();
    server.complete("say:hello", json!({}));
    server.complete("say:hello", json!({"max_tokens": 1}));
    server.complete("say:ab", json!({"n": 3}));
    server.get("/nowhere").error(404);
    for method in ["MADEUP", "MADEUP2"] {
        read(server.send(method, "/nowhere", "", b"")).error(404);
    }
    let answer = server.get("/metrics");
    assert!(answer.headers.contains("content-type: text/plain; version=0.0.4"), "{}", answer.headers);
    for line in [
        "vllm:num_requests_running{model_name=\"test\"} 0",
        "vllm:num_requests_waiting{model_name=\"test\"} 0",
        "vllm:kv_cache_usage_perc{model_name=\"test\"} 0",
        "vllm:prompt_tokens_total{model_name=\"test\"} 5",
        "vllm:generation_tokens_total{model_name=\"test\"} 0",
        "vllm:prefix_cache_queries_total{model_name=\"test\"} 0",
        "vllm:prefix_cache_hits_total{model_name=\"test\"} 0",
        "vllm:time_to_first_token_seconds_count{model_name=\"test\"} 5",
        "vllm:inter_token_latency_seconds_count{model_name=\"test\"} 7",
        "vllm:e2e_request_latency_seconds_count{model_name=\"test\"} 5",
        "vllm:request_success_total{model_name=\"test\",finished_reason=\"stop\"} 4",
        "vllm:request_success_total{model_name=\"test\",finished_reason=\"length\"} 1",
        "vllm:request_prompt_tokens_count{model_name=\"test\"} 5",
        "vllm:request_prompt_tokens_sum{model_name=\"test\"} 36",
        "vllm:request_prompt_tokens_bucket{model_name=\"test\",le=\"5\"} 0",
        "vllm:request_prompt_tokens_bucket{model_name=\"test\",le=\"10\"} 5",
        "vllm:request_generation_tokens_sum{model_name=\"test\"} 16",
        "vllm:request_max_num_generation_tokens_sum{model_name=\"test\"} 10",
        "vllm:request_params_max_tokens_sum{model_name=\"test\"} 65",
        "vllm:request_params_n_sum{model_name=\"test\"} 5",
        "http_requests_total{model_name=\"test\",handler=\"/v1/completions\",method=\"POST\",status=\"2xx\"} 3",
        "http_requests_total{model_name=\"test\",handler=\"none\",method=\"other\",status=\"4xx\"} 2",
        "http_requests_total{model_name=\"test\",handler=\"none\",method=\"GET\",status=\"4xx\"} 1",
        "vllm:request_queue_time_seconds_sum{model_name=\"test\"} 0.25",
        "vllm:request_queue_time_seconds_count{model_name=\"test\"} 1",
        "vllm:request_queue_time_seconds_bucket{model_name=\"test\",le=\"0.2\"} 0",
        "vllm:request_queue_time_seconds_bucket{model_name=\"test\",le=\"0.3\"} 1",
        "vllm:request_queue_time_seconds_bucket{model_name=\"test\",le=\"+Inf\"} 1",
        "vllm:request_prefill_time_seconds_sum{model_name=\"test\"} 0.5",
        "vllm:request_decode_time_seconds_sum{model_name=\"test\"} 2",
        "vllm:request_inference_time_seconds_sum{model_name=\"test\"} 2.5",
        "vllm:iteration_tokens_total_sum{model_name=\"test\"} 709",
        "vllm:iteration_tokens_total_bucket{model_name=\"test\",le=\"8\"} 2",
        "vllm:iteration_tokens_total_bucket{model_name=\"test\",le=\"1024\"} 3",
        "vllm:cache_config_info{model_name=\"test\",engine=\"0\",block_size=\"16\",cache_dtype=\"auto\",\
            enable_prefix_caching=\"True\",num_gpu_blocks=\"200\",sliding_window=\"None\"} 1",
        "ringspan:kv_pages_used{model_name=\"test\",rank=\"0\"} 0",
        "ringspan:kv_pages_cached{model_name=\"test\",rank=\"1\"} 7",
        "ringspan:transfer_bytes_total{model_name=\"test\",rank=\"0\"} 11",
        "ringspan:wait_seconds_total{model_name=\"test\",rank=\"1\"} 0.5",
    ] {
        let found = answer.body.lines().any(|found| found.strip_suffix(".0").unwrap_or(found) == line);
        assert!(found, "{line} is missing in\n{}", answer.body);
    }
}

/// Routers find the adapters that a server computes with in the labels, and the newest labels by the time that is their value.
#[test]
fn metrics_name_the_adapters_at_this_time() {
    let server = start();
    let folder = tempfile::tempdir().unwrap();
    for name in ["b", "a"] {
        server.post("/v1/load_lora_adapter", json!({"lora_name": name, "lora_path": folder.path()}));
    }
    let text = server.get("/metrics").body;
    let labels = "model_name=\"test\",max_lora=\"8\",running_lora_adapters=\"a,b\",waiting_lora_adapters=\"\"";
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("vllm:lora_requests_info{{{labels}}} ")));
    let time: f64 = line.unwrap_or_else(|| panic!("{labels} are missing in\n{text}")).parse().unwrap();
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    assert!((now - time).abs() < 60.0, "{time} at {now}");
}

#[test]
fn models_are_listed_with_their_adapters() {
    let server = start();
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        server.post("/v1/load_lora_adapter", json!({"lora_name": "org/a", "lora_path": folder.path()})).status,
        200
    );
    let list = server.get("/v1/models").json();
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["test", "org/a"]);
    for model in list["data"].as_array().unwrap() {
        assert_eq!(model["capabilities"], json!({"completion_chat": true}));
    }
    assert_eq!((&list["data"][0]["parent"], &list["data"][1]["parent"]), (&json!(null), &json!("test")));
    assert_eq!(server.get("/v1/models/org/a").json()["id"], "org/a");
    server.get("/v1/models/b").error(404);
    assert_eq!(server.complete("say:x", json!({"model": "org/a"})).json()["model"], "org/a");
    server.post("/v1/load_lora_adapter", json!({"lora_name": "org/a", "lora_path": folder.path()})).error(400);
    server.post("/v1/load_lora_adapter", json!({"lora_name": "b", "lora_path": "/nowhere"})).error(400);
    for (name, reason) in [("test", "is the name of the model itself"), ("", "must not be empty")] {
        let asked = json!({"lora_name": name, "lora_path": folder.path()});
        let error = server.post("/v1/load_lora_adapter", asked).error(400);
        assert!(error["param"] == "lora_name" && error["message"].as_str().unwrap().contains(reason), "{error}");
    }
    let error = server.post("/v1/unload_lora_adapter", json!({"lora_name": "b"})).error(404);
    assert!(error["param"] == "lora_name" && error["message"].as_str().unwrap().contains("org/a"), "{error}");
    assert_eq!(server.post("/v1/unload_lora_adapter", json!({"lora_name": "org/a"})).status, 200);
    server.post("/v1/unload_lora_adapter", json!({"lora_name": "org/a"})).error(404);
    server.complete("say:x", json!({"model": "org/a"})).error(404);
}

#[test]
fn the_page_and_the_description_are_served() {
    let server = start();
    let page = server.get("/");
    assert!(page.headers.contains("text/html") && page.body.contains("/v1/chat/completions"), "{}", page.headers);
    let openapi = server.get("/openapi.json").json();
    let paths = openapi["paths"].as_object().unwrap();
    for path in paths.keys().filter(|path| !path.contains('{')) {
        // Each route that is described is there.
        let status = server.request("PATCH", path, "", b"").status;
        assert_eq!(status, 405, "{path}");
    }
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/messages/count_tokens", "/metrics", "/detokenize"] {
        assert!(paths.contains_key(path), "{path}");
    }
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(server.get("/health").json()["status"], "ok");
}
