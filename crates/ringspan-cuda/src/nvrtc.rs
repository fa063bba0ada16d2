//! NVIDIA's run-time compiler (NVRTC): compiles kernels for given constants, once for each GPU.

use crate::error::failed;
use crate::library;
use cudarc::driver::{CudaContext, CudaModule};
use cudarc::nvrtc::{Ptx, result, sys};
use ringspan::{Error, Result};
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

/// Functions with which kernels read and write numbers: `element<TYPE>` and `store<TYPE>` with `F32`, `BF16` and `F16`.
/// Every source starts with this text.
pub const ELEMENT: &str = include_str!("source/element.cu");

/// Source code of kernels in CUDA C++.
#[derive(Debug, Clone)]
pub struct Source {
    /// The text.
    pub text: String,
    /// Macros that are defined as numbers.
    pub definitions: Vec<(&'static str, usize)>,
    /// Whether it uses features that only GPUs of its own architecture have, and no later ones.
    pub specific: bool,
}

impl Source {
    /// Compiles the source to machine code for an architecture, such as `sm_90`.
    ///
    /// # Errors
    /// The compiler's error messages; also for an architecture that it does not know.
    pub fn compile(&self, architecture: &str) -> std::result::Result<Vec<u8>, String> {
        self.compile_with(architecture, None).map(|(binary, _)| binary)
    }

    /// Like [`compile`](Self::compile), with another argument; also returns the compiler's log.
    pub(crate) fn compile_with(
        &self,
        architecture: &str,
        argument: Option<&str>,
    ) -> std::result::Result<(Vec<u8>, String), String> {
        let text = CString::new(&*self.text).map_err(|_| "a source with a zero in it")?;
        let target = format!("{architecture}{}", if self.specific { "a" } else { "" });
        let mut arguments = vec![format!("--gpu-architecture={target}"), "--std=c++17".into()];
        arguments.extend(self.definitions.iter().map(|(name, value)| format!("-D{name}={value}")));
        arguments.extend(argument.map(Into::into));
        let program =
            Program(result::create_program(&text, Some(c"kernels.cu")).map_err(|error| format!("{error:?}"))?);
        // SAFETY: the program was just made, and is not destroyed before the end of this function.
        let compiled = unsafe { result::compile_program(program.0, &arguments) };
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        // SAFETY: the log ends with a zero; if it is not available, it is empty.
        let log = if log.is_empty() { c"" } else { unsafe { CStr::from_ptr(log.as_ptr()) } };
        let log = log.to_string_lossy().into_owned();
        compiled.map_err(|error| format!("{error:?} for {target}, {}: {log}", arguments.join(" ")))?;
        let failed = |error| format!("{error:?}: the compiler gave no machine code for {target}");
        let mut size = 0;
        // SAFETY: as above, and the call writes to a valid number.
        unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }.result().map_err(failed)?;
        let mut binary = vec![0u8; size];
        // SAFETY: the buffer has the size that the compiler returned.
        unsafe { sys::nvrtcGetCUBIN(program.0, binary.as_mut_ptr().cast()) }.result().map_err(failed)?;
        Ok((binary, log))
    }
}

/// A program of the compiler, destroyed when it is dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was made by the compiler and is destroyed once. A failure only leaks memory.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiled kernels, or `None` while they are compiled under the lock.
type Slot = Arc<Mutex<Option<Arc<CudaModule>>>>;

/// Compiled kernels of GPUs by key, which must identify source and GPU.
#[derive(Debug)]
pub struct Modules<K> {
    compiled: Mutex<HashMap<K, Slot>>,
}

impl<K> Default for Modules<K> {
    fn default() -> Self {
        Self { compiled: Mutex::default() }
    }
}

impl<K: Eq + Hash> Modules<K> {
    /// Returns the kernels for `key`, compiling them for the GPU of `context` at the first call, which takes about a
    /// second.
    ///
    /// # Errors
    /// A source that the compiler refuses, or code that the driver refuses.
    pub fn get(&self, key: K, context: &Arc<CudaContext>, source: impl FnOnce() -> Source) -> Result<Arc<CudaModule>> {
        let slot: Slot = {
            let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
            compiled.entry(key).or_default().clone()
        };
        // Only ranks that need the same kernels wait for their compilation.
        let mut compiled = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*compiled {
            return Ok(module.clone());
        }
        let device = format!("GPU {}", context.ordinal());
        let (major, minor) = context.compute_capability().map_err(failed(&device, "ask for its architecture"))?;
        let binary = source().compile(&format!("sm_{major}{minor}")).map_err(|message| Error::Device {
            device: device.clone(),
            operation: "compile kernels",
            message,
        })?;
        let module = context.load_module(Ptx::from_binary(binary)).map_err(failed(&device, "load compiled kernels"))?;
        *compiled = Some(module.clone());
        Ok(module)
    }
}

/// Whether the compiler's library can be loaded.
#[must_use]
pub fn is_there() -> bool {
    library::is_there(library::COMPILER)
}

/// Checks that there is a compiler whose code a driver for this version of CUDA accepts; the error says what is missing.
pub(crate) fn check(driver: i32) -> std::result::Result<(), String> {
    let package = "part of CUDA, and of the Python package nvidia-cuda-nvrtc";
    if !is_there() {
        return Err(format!(
            "no compiler for kernels was found (libnvrtc.so, {package}): put the folder of one of version {driver} into \
             LD_LIBRARY_PATH"
        ));
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the call writes to valid numbers.
    let asked = unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result();
    asked.map_err(|error| format!("the compiler does not say its version: {error:?}"))?;
    if major > driver {
        return Err(format!(
            "the compiler found is NVRTC {major}.{minor}, whose code a driver for CUDA {driver} does not take: put the \
             folder of one of version {driver} ({package}) into LD_LIBRARY_PATH, or renew the driver"
        ));
    }
    Ok(())
}
