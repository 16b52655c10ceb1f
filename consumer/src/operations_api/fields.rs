//! JSON that others sent, read field by field, so that what is wrong with it can be named without quoting it: serde's
//! own errors repeat the value.

use serde_json::{Map, Value};

/// The words of an operation's effect.
pub(crate) const EFFECTS: &str = "read, idempotent or side_effect";

/// What is wrong with a body: where, and what would be right; never what stands there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Misfit {
    #[error("the body is not JSON from line {line}, column {column} on")]
    NotJson { line: usize, column: usize },
    #[error("{0} is missing")]
    Missing(String),
    #[error("{field} must be {wanted}")]
    Wrong { field: String, wanted: &'static str },
}

impl Misfit {
    /// The field, where it is about one.
    pub(crate) fn field(&self) -> Option<&str> {
        match self {
            Self::NotJson { .. } => None,
            Self::Missing(field) | Self::Wrong { field, .. } => Some(field),
        }
    }
}

/// A value and where it stands, such as `operations[2].name`.
pub(crate) struct Field {
    path: String,
    value: Value,
}

/// An object that gives its fields away.
pub(crate) struct Object {
    path: String,
    fields: Map<String, Value>,
}

/// The object that a whole body should be.
pub(crate) fn parse(body: &[u8]) -> Result<Object, Misfit> {
    let value = serde_json::from_slice(body)
        .map_err(|error| Misfit::NotJson { line: error.line(), column: error.column() })?;
    match value {
        Value::Object(fields) => Ok(Object { path: String::new(), fields }),
        _ => Err(Misfit::Wrong { field: "the body".into(), wanted: "an object" }),
    }
}

impl Object {
    /// A field that must be there; `null` is a value.
    pub(crate) fn take(&mut self, name: &str) -> Result<Field, Misfit> {
        let path = if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) };
        match self.fields.remove(name) {
            Some(value) => Ok(Field { path, value }),
            None => Err(Misfit::Missing(path)),
        }
    }

    /// A field that may be absent or `null`, which are the same.
    pub(crate) fn optional(&mut self, name: &str) -> Option<Field> {
        self.take(name).ok().filter(|field| !field.value.is_null())
    }
}

impl Field {
    /// The value as it is.
    pub(crate) fn into_value(self) -> Value {
        self.value
    }

    pub(crate) fn into_text(self) -> Result<String, Misfit> {
        match self.value {
            Value::String(text) => Ok(text),
            _ => Err(Misfit::Wrong { field: self.path, wanted: "a string" }),
        }
    }

    pub(crate) fn into_object(self) -> Result<Object, Misfit> {
        match self.value {
            Value::Object(fields) => Ok(Object { path: self.path, fields }),
            _ => Err(Misfit::Wrong { field: self.path, wanted: "an object" }),
        }
    }

    pub(crate) fn into_items(self) -> Result<Vec<Self>, Misfit> {
        let Value::Array(items) = self.value else {
            return Err(Misfit::Wrong { field: self.path, wanted: "an array" });
        };
        let at = |(index, value)| Self { path: format!("{}[{index}]", self.path), value };
        Ok(items.into_iter().enumerate().map(at).collect())
    }

    /// One of the words of an enum.
    pub(crate) fn into_word<T: serde::de::DeserializeOwned>(self, wanted: &'static str) -> Result<T, Misfit> {
        serde_json::from_value(self.value).map_err(|_| Misfit::Wrong { field: self.path, wanted })
    }
}

#[cfg(test)]
mod tests {
    use shared::state::Effect;

    use super::*;

    #[test]
    fn what_is_wrong_is_named_by_its_path_and_never_quoted() {
        let items = |body: &str| parse(body.as_bytes())?.take("operations")?.into_items();
        let first = |body: &str| items(body)?.swap_remove(0).into_object()?.take("effect");
        let word = |body: &str| first(body)?.into_word::<Effect>("read or write").map(drop);
        let found = |body: &str| word(body).unwrap_err().to_string();

        assert_eq!(found("{\n\"secret\": oops}"), "the body is not JSON from line 2, column 11 on");
        assert_eq!(found(""), "the body is not JSON from line 1, column 0 on");
        assert_eq!(found("\"secret\""), "the body must be an object");
        assert_eq!(found(r#"{"secret": 1}"#), "operations is missing");
        assert_eq!(found(r#"{"operations": "secret"}"#), "operations must be an array");
        assert_eq!(found(r#"{"operations": ["secret"]}"#), "operations[0] must be an object");
        assert_eq!(found(r#"{"operations": [{}]}"#), "operations[0].effect is missing");
        assert_eq!(
            found(r#"{"operations": [{"effect": "secret"}]}"#),
            "operations[0].effect must be read or write"
        );
    }

    #[test]
    fn null_is_a_value_where_a_field_must_be_and_nothing_where_it_may_be() {
        let mut object = parse(br#"{"input": null, "output": null}"#).unwrap();
        assert_eq!(object.take("input").unwrap().into_value(), Value::Null);
        assert!(object.optional("output").is_none());
        assert!(object.optional("absent").is_none());
    }
}
