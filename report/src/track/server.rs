//! Client of a tracking server with MLflow's REST interface, version 2.0.

use std::time::Duration;

use serde_json::{Value, json};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, RequestBuilder, http::Response};

use crate::ReportError;

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Number of metrics that the server accepts per request.
const MAX_METRICS: usize = 1000;

/// Number of parameters that the server accepts per request.
const MAX_PARAMS: usize = 100;

/// Longest name of a metric, in characters.
const MAX_NAME_CHARS: usize = 250;

/// Longest value of a parameter, in characters.
const MAX_VALUE_CHARS: usize = 6000;

/// Longest value of a tag, in characters.
const MAX_TAG_CHARS: usize = 5000;

/// A tracking server.
pub(super) struct Server {
    agent: Agent,
    address: String,
    /// Value of the `authorization` header.
    authorization: Option<String>,
}

/// Identity of a run on the server.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct RunId {
    pub(super) experiment_id: String,
    pub(super) run_id: String,
}

/// Value of a metric after `step` steps.
pub(super) struct Metric {
    pub(super) name: String,
    pub(super) step: u64,
    pub(super) value: f64,
}

impl Server {
    /// Creates a client of the server at `address`. `authorization` is the value of the header of
    /// that name.
    pub(super) fn new(address: &str, authorization: Option<String>) -> Self {
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .timeout_global(Some(TIMEOUT))
            // The body holds the server's description of an error.
            .http_status_as_error(false);
        Self {
            agent: config.build().new_agent(),
            address: address.trim_end_matches('/').to_string(),
            authorization,
        }
    }

    /// Begins a run in `experiment`, which is created if missing. Long values of `tags` are cut.
    pub(super) fn begin(
        &self,
        experiment: &str,
        name: &str,
        at_ms: u64,
        tags: &[(&str, String)],
    ) -> Result<RunId, ReportError> {
        let experiment_id = self.find_or_create_experiment(experiment)?;
        let tags: Vec<Value> = tags
            .iter()
            .map(|(key, value)| json!({ "key": key, "value": first_chars(value, MAX_TAG_CHARS) }))
            .collect();
        let body =
            json!({ "experiment_id": experiment_id, "run_name": name, "start_time": at_ms, "tags": tags });
        let answer = self.post("runs/create", &body)?;
        let run_id = answer.pointer("/run/info/run_id").and_then(Value::as_str);
        Ok(RunId {
            experiment_id,
            run_id: run_id.ok_or(ReportError::Incomplete { missing: "run" })?.to_string(),
        })
    }

    /// Sends the values of a recipe.
    pub(super) fn send_params(&self, run: &RunId, values: &[(String, String)]) -> Result<(), ReportError> {
        for chunk in values.chunks(MAX_PARAMS) {
            let params: Vec<Value> = chunk
                .iter()
                .map(|(key, value)| json!({ "key": key, "value": first_chars(value, MAX_VALUE_CHARS) }))
                .collect();
            self.post("runs/log-batch", &json!({ "run_id": run.run_id, "params": params }))?;
        }
        Ok(())
    }

    /// Sends metrics. Their times are made up: a millisecond per step after `begun_ms`, the start
    /// of the run.
    pub(super) fn send_metrics(
        &self,
        run: &RunId,
        metrics: &[Metric],
        begun_ms: u64,
    ) -> Result<(), ReportError> {
        for chunk in metrics.chunks(MAX_METRICS) {
            let metrics: Vec<Value> = chunk
                .iter()
                .map(|metric| {
                    // A retry repeats the timestamp, so the server keeps one copy.
                    let at_ms = begun_ms + metric.step;
                    let key = to_allowed_name(&metric.name);
                    json!({ "key": key, "value": metric.value, "timestamp": at_ms, "step": metric.step })
                })
                .collect();
            self.post("runs/log-batch", &json!({ "run_id": run.run_id, "metrics": metrics }))?;
        }
        Ok(())
    }

    /// Sends the state of the run, such as `RUNNING`, `FINISHED`, `FAILED` or `KILLED`, and the
    /// time at which it ended.
    pub(super) fn send_state(
        &self,
        run: &RunId,
        state: &str,
        ended_ms: Option<u64>,
    ) -> Result<(), ReportError> {
        let body = json!({ "run_id": run.run_id, "status": state, "end_time": ended_ms });
        self.post("runs/update", &body).map(drop)
    }

    /// Uploads a file to the run. A server without an artifact store rejects it.
    pub(super) fn send_file(&self, run: &RunId, name: &str, bytes: &[u8]) -> Result<(), ReportError> {
        let RunId { experiment_id, run_id } = run;
        let path = format!("mlflow-artifacts/artifacts/{experiment_id}/{run_id}/artifacts/{name}");
        let request = self.agent.put(self.url(&path));
        self.read(&path, self.authorized(request).send(bytes)).map(drop)
    }

    /// Returns the identity of the experiment `name`, which is created if missing.
    fn find_or_create_experiment(&self, name: &str) -> Result<String, ReportError> {
        let path = "experiments/get-by-name";
        let request = self.agent.get(self.url(&format!("mlflow/{path}"))).query("experiment_name", name);
        let response = self.authorized(request).call();
        let answer = match response {
            Ok(response) if response.status() == 404 => {
                self.post("experiments/create", &json!({ "name": name }))?
            }
            response => self.read(path, response)?,
        };
        let id = answer.get("experiment_id").or_else(|| answer.pointer("/experiment/experiment_id"));
        let id = id.and_then(Value::as_str).ok_or(ReportError::Incomplete { missing: "experiment" })?;
        Ok(id.to_string())
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value, ReportError> {
        let request = self.agent.post(self.url(&format!("mlflow/{path}")));
        self.read(path, self.authorized(request).send_json(body))
    }

    fn url(&self, path: &str) -> String {
        format!("{}/api/2.0/{path}", self.address)
    }

    fn authorized<Any>(&self, request: RequestBuilder<Any>) -> RequestBuilder<Any> {
        match &self.authorization {
            Some(value) => request.header("authorization", value),
            None => request,
        }
    }

    /// Reads the response to the request `path`.
    fn read(&self, path: &str, response: Result<Response<Body>, ureq::Error>) -> Result<Value, ReportError> {
        let mut response =
            response.map_err(|source| ReportError::NoResponse { address: self.address.clone(), source })?;
        let text = response.body_mut().read_to_string().map_err(ReportError::Response)?;
        if !response.status().is_success() {
            let answer = serde_json::from_str::<Value>(&text).unwrap_or_default();
            let reason = answer.get("message").and_then(Value::as_str).unwrap_or(text.trim());
            return Err(ReportError::Refused {
                address: self.address.clone(),
                status: response.status().to_string(),
                path: path.to_string(),
                reason: first_chars(reason, 300),
            });
        }
        Ok(serde_json::from_str(&text).unwrap_or_default())
    }
}

/// Returns the first `n` characters of `text`.
fn first_chars(text: &str, n: usize) -> String {
    text.chars().take(n).collect()
}

/// Converts `name` to one that the server accepts: without empty parts, and with an underscore for
/// each forbidden character.
fn to_allowed_name(name: &str) -> String {
    let mut allowed = String::new();
    for c in name.chars() {
        let is_allowed = c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ' ' | '/');
        allowed.push(if is_allowed { c } else { '_' });
    }
    let parts = allowed.split('/').filter(|part| !matches!(*part, "" | "." | ".."));
    first_chars(&parts.collect::<Vec<_>>().join("/"), MAX_NAME_CHARS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_converted_to_ones_that_the_server_accepts() {
        assert_eq!(to_allowed_name("eval/data//teacher/224px/knn_20"), "eval/data/teacher/224px/knn_20");
        assert_eq!(to_allowed_name("/../a:b/é(1)"), "a_b/__1_");
        assert_eq!(to_allowed_name(&"x".repeat(300)).len(), MAX_NAME_CHARS);
    }
}
