//! Finding and loading ONNX Runtime's library.
//!
//! `unsafe`: setting an environment variable before any thread exists.

use ort::environment::Environment;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The release that this build expects.
pub const VERSION: &str = "1.31.1";
/// The environment variable that stops ONNX Runtime's telemetry when it is 1 before the library is loaded.
const TELEMETRY: &str = "ORT_DISABLE_TELEMETRY";
/// The environment variable that names the library.
const DYLIB_PATH: &str = "ORT_DYLIB_PATH";
/// Where `make setup` puts the library, relative to the working directory.
const SETUP_FOLDER: &str = ".setup/onnxruntime";

/// Switches ONNX Runtime's telemetry off. The very first thing that a process does, before any thread starts.
///
/// Linux builds of the library otherwise start a thread, write a database and a device id below the user's cache folder,
/// and send reports.
#[allow(unsafe_code, clippy::disallowed_methods)]
pub fn prepare_process() {
    // SAFETY: called as the first statement of `main`, so no other thread can read the environment meanwhile; the test
    // `telemetry_must_be_off` shows that `Runtime::load` refuses to go on without it.
    unsafe { std::env::set_var(TELEMETRY, "1") };
}

/// The loaded library with its one environment. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Runtime {
    pub(super) environment: Environment,
    path: PathBuf,
}

/// Why ONNX Runtime cannot be used; the text says what was tried and what to run.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// No library at any of the usual places.
    #[error(
        "ONNX Runtime {VERSION} was not found. Tried:\n{}\nRun `make setup`, or name the library with --onnxruntime, \
         runtime.library in the configuration, or {DYLIB_PATH}.",
        tried.iter().map(|path| format!("  - {path}")).collect::<Vec<_>>().join("\n")
    )]
    NotFound {
        /// Each place, with how it came into question.
        tried: Vec<String>,
    },
    /// A library is there but does not load.
    #[error("ONNX Runtime at {} cannot be loaded: {message}. Version {VERSION} is expected; `make setup` fetches it.", path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// The loader's words.
        message: String,
    },
    /// Telemetry would start.
    #[error("{TELEMETRY}=1 must be in the environment before ONNX Runtime is loaded")]
    Telemetry,
}

impl Runtime {
    /// Loads the library from `configured` (flag or configuration key), else from `ORT_DYLIB_PATH`, else from the set-up
    /// folder, else from beside the executable. A process has one library and one environment: once there is one, it is what
    /// every further call gets.
    ///
    /// # Errors
    /// See [`RuntimeError`].
    pub fn load(configured: Option<&Path>) -> Result<Self, RuntimeError> {
        static LOADED: Mutex<Option<Runtime>> = Mutex::new(None);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*loaded {
            return Ok(runtime.clone());
        }
        let runtime = Self::load_first(configured)?;
        *loaded = Some(runtime.clone());
        Ok(runtime)
    }

    fn load_first(configured: Option<&Path>) -> Result<Self, RuntimeError> {
        if std::env::var_os(TELEMETRY).is_none_or(|value| value != "1") {
            return Err(RuntimeError::Telemetry);
        }
        let path = find(configured, &Places::of_this_process())?;
        let fail = |message: String| RuntimeError::Load { path: path.clone(), message };
        let builder = ort::environment::init_from(&path).map_err(|error| fail(error.to_string()))?;
        let environment = builder
            .with_name("concertina")
            .with_telemetry(false)
            .build()
            .map_err(|error| fail(error.message().to_owned()))?;
        // Each failure comes back as a status with the same words, and many are a client's; the rest is for its developers.
        environment.set_log_level(ort::logging::LogLevel::Fatal);
        Ok(Self { environment, path })
    }

    /// Where the library was loaded from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The library's build description, with its version.
    #[must_use]
    pub fn build_info(&self) -> &'static str {
        ort::info()
    }
}

/// Where to look, besides the configured path.
struct Places {
    environment: Option<PathBuf>,
    setup: PathBuf,
    beside: Option<PathBuf>,
}

impl Places {
    fn of_this_process() -> Self {
        let executable = std::env::current_exe().ok();
        Self {
            environment: std::env::var_os(DYLIB_PATH).filter(|path| !path.is_empty()).map(PathBuf::from),
            setup: PathBuf::from(SETUP_FOLDER),
            beside: executable.and_then(|path| path.parent().map(Path::to_path_buf)),
        }
    }
}

/// An explicit path must exist; of the folders the first that has the library wins.
fn find(configured: Option<&Path>, places: &Places) -> Result<PathBuf, RuntimeError> {
    let explicit = [(configured, "--onnxruntime or runtime.library"), (places.environment.as_deref(), DYLIB_PATH)];
    for (path, origin) in explicit {
        if let Some(path) = path {
            return absolute(path)
                .ok_or_else(|| RuntimeError::NotFound { tried: vec![format!("{} ({origin})", path.display())] });
        }
    }
    let mut tried = Vec::new();
    let folders = [(Some(&places.setup), "the set-up folder"), (places.beside.as_ref(), "beside the executable")];
    for (folder, origin) in folders {
        let Some(folder) = folder else { continue };
        for name in [format!("libonnxruntime.so.{VERSION}"), "libonnxruntime.so".to_owned()] {
            let path = folder.join(name);
            match absolute(&path) {
                Some(found) => return Ok(found),
                None => tried.push(format!("{} ({origin})", path.display())),
            }
        }
    }
    Err(RuntimeError::NotFound { tried })
}

fn absolute(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().filter(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(folder: &Path) -> Places {
        Places { environment: None, setup: folder.join("setup"), beside: Some(folder.to_path_buf()) }
    }

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("concertina-library-{name}-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("setup")).unwrap();
        folder
    }

    #[test]
    fn the_configured_path_wins_and_must_exist() {
        let folder = scratch("configured");
        let library = folder.join("mine.so");
        std::fs::write(&library, "").unwrap();
        assert_eq!(find(Some(&library), &places(&folder)).unwrap(), library.canonicalize().unwrap());
        let missing = folder.join("absent.so");
        let error = find(Some(&missing), &places(&folder)).unwrap_err().to_string();
        assert!(error.contains("absent.so") && error.contains("make setup"), "{error}");
    }

    #[test]
    fn the_set_up_folder_comes_before_the_executable_and_failure_names_every_place() {
        let folder = scratch("order");
        let error = find(None, &places(&folder)).unwrap_err().to_string();
        assert!(error.contains("the set-up folder") && error.contains("beside the executable"), "{error}");
        std::fs::write(folder.join("libonnxruntime.so"), "").unwrap();
        assert!(find(None, &places(&folder)).unwrap().ends_with("libonnxruntime.so"));
        let preferred = folder.join(format!("setup/libonnxruntime.so.{VERSION}"));
        std::fs::write(&preferred, "").unwrap();
        assert_eq!(find(None, &places(&folder)).unwrap(), preferred.canonicalize().unwrap());
    }
}
