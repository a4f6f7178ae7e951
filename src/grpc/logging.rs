//! The log settings, from and to the JSON that HTTP has for them.

use super::proto::log_settings_request::setting_value::ParameterChoice as Wanted;
use super::proto::log_settings_response::SettingValue;
use super::proto::log_settings_response::setting_value::ParameterChoice;
use super::proto::{LogSettingsRequest, LogSettingsResponse};
use crate::http::{ApiError, AppState, log_settings};
use serde_json::Value;

/// What is logged, if that is what the request wants.
pub(super) fn settings(state: &AppState, request: LogSettingsRequest) -> Result<LogSettingsResponse, ApiError> {
    let wanted = request.settings.into_iter().map(|(key, value)| (key, json(value.parameter_choice)));
    let Value::Object(settings) = log_settings(state, &wanted.collect())? else { return Err(ApiError::Internal) };
    let settings = settings.into_iter().map(|(key, value)| (key, SettingValue { parameter_choice: choice(&value) }));
    Ok(LogSettingsResponse { settings: settings.collect() })
}

/// A setting without a value is not to be changed.
fn json(choice: Option<Wanted>) -> Value {
    match choice {
        None => Value::Null,
        Some(Wanted::BoolParam(value)) => value.into(),
        Some(Wanted::Uint32Param(value)) => value.into(),
        Some(Wanted::StringParam(value)) => value.into(),
    }
}

fn choice(value: &Value) -> Option<ParameterChoice> {
    Some(match value {
        Value::Bool(value) => ParameterChoice::BoolParam(*value),
        Value::Number(value) => ParameterChoice::Uint32Param(u32::try_from(value.as_u64()?).ok()?),
        Value::String(value) => ParameterChoice::StringParam(value.clone()),
        Value::Null | Value::Array(_) | Value::Object(_) => return None,
    })
}
