//! Kernels compiled for the shapes at hand, once for each GPU.

use super::library;
use super::options::Options;
use crate::error::{Error, Result};
use cudarc::driver::{CudaContext, CudaModule};
use cudarc::nvrtc::{Ptx, result, sys};
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::{Arc, Mutex, PoisonError};

/// Kernels that are there, or will be when whoever compiles them lets go of the lock.
type Slot = Arc<Mutex<Option<Arc<CudaModule>>>>;

/// The kernels of a GPU.
pub(super) struct Modules {
    context: Arc<CudaContext>,
    /// Its architecture as the compiler names it.
    architecture: String,
    compiled: Mutex<HashMap<Options, Slot>>,
}

impl Modules {
    pub(super) fn new(context: Arc<CudaContext>, (major, minor): (i32, i32)) -> Self {
        Self { context, architecture: format!("sm_{major}{minor}"), compiled: Mutex::default() }
    }

    /// Compiles what was not asked for before: a second or so.
    pub(super) fn get(&self, options: &Options, device: &str) -> Result<Arc<CudaModule>> {
        let slot: Slot = {
            let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
            compiled.entry(options.clone()).or_default().clone()
        };
        // Only ranks that ask for the same kernels wait for the first of them.
        let mut compiled = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*compiled {
            return Ok(module.clone());
        }
        let binary = compile(options, &self.architecture).map_err(|message| Error::Device {
            device: device.into(),
            operation: "compile kernels",
            message,
        })?;
        let module = self
            .context
            .load_module(Ptx::from_binary(binary))
            .map_err(super::failed(device, "load compiled kernels"))?;
        *compiled = Some(module.clone());
        Ok(module)
    }
}

/// Whether there is a compiler whose code a driver for this version of CUDA takes; else what is missing.
pub(super) fn check_compiler(driver: i32) -> std::result::Result<(), String> {
    let package = "part of CUDA, and of the Python package nvidia-cuda-nvrtc";
    if !compiler_is_there() {
        return Err(format!(
            "no compiler for kernels was found (libnvrtc.so, {package}): put the folder of one of version {driver} into \
             LD_LIBRARY_PATH"
        ));
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the numbers are where the call may write.
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

fn compiler_is_there() -> bool {
    library::is_there(library::COMPILER)
}

/// Machine code for GPUs of an architecture, such as `sm_90`.
fn compile(options: &Options, architecture: &str) -> std::result::Result<Vec<u8>, String> {
    compile_with(options, architecture, None).map(|(binary, _)| binary)
}

/// The same, and what the compiler says.
fn compile_with(
    options: &Options,
    architecture: &str,
    argument: Option<&str>,
) -> std::result::Result<(Vec<u8>, String), String> {
    let source = CString::new(options.source()).map_err(|_| "a source with a zero in it")?;
    let architecture = options.target(architecture);
    let mut arguments = vec![format!("--gpu-architecture={architecture}"), "--std=c++17".into()];
    arguments.extend(options.definitions());
    arguments.extend(argument.map(Into::into));
    let program =
        Program(result::create_program(&source, Some(c"attention.cu")).map_err(|error| format!("{error:?}"))?);
    // SAFETY: the program was just made, and lives until the end.
    let compiled = unsafe { result::compile_program(program.0, &arguments) };
    // SAFETY: as above.
    let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
    // SAFETY: the log ends with a zero; one that could not be had is empty.
    let log = if log.is_empty() { c"" } else { unsafe { CStr::from_ptr(log.as_ptr()) } };
    let log = log.to_string_lossy().into_owned();
    compiled.map_err(|error| format!("{error:?} for {architecture}, {}: {log}", arguments.join(" ")))?;
    let failed = |error| format!("{error:?}: the compiler gave no machine code for {architecture}");
    let mut size = 0;
    // SAFETY: as above, and the size is where the call may write.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }.result().map_err(failed)?;
    let mut binary = vec![0u8; size];
    // SAFETY: the buffer has the size that was asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, binary.as_mut_ptr().cast()) }.result().map_err(failed)?;
    Ok((binary, log))
}

/// A program of the compiler, given back at the end.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by the compiler and given back once. A failure leaves memory behind, nothing else.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::view::Stored;
    use super::super::super::{Buckets, Data, Dropout, HeadMap, Inputs, Relative, Score, View};
    use super::super::options::{Pass, SHARED_MEMORY, TENSOR_WIDTHS, TensorCores};
    use super::*;
    use half::{bf16, f16};
    use std::collections::HashSet;

    /// Most bytes of shared memory of a block on Hopper.
    const HOPPER: usize = 227 * 1024;

    /// Without a GPU this still shows that the kernels are CUDA, fit its architectures, and agree on the job's size.
    #[test]
    fn kernels_compile_and_fit_for_every_architecture_since_ampere() {
        if !compiler_is_there() {
            println!("skipped: no NVRTC (libnvrtc.so) on this machine");
            return;
        }
        let heads = HeadMap::grouped(1, 1).expect("they divide");
        let plain = Score::new(1.0);
        let buckets = Buckets { table: vec![0.0; 32], count: 32, max_distance: 128, bidirectional: true };
        let all = Score {
            softcap: Some(20.0),
            relative: Some(Relative::Buckets(buckets)),
            dropout: Some(Dropout { rate: 0.1, seed: 0, first_head: 0 }),
            ..plain.clone()
        };
        let alibi = Score { relative: Some(Relative::Alibi { slopes: vec![0.1] }), ..plain.clone() };
        let types = [Stored::F32, Stored::Bf16, Stored::F16];
        // Of an A100, an L40, an H100 (also with what only it has), a B200, and of what stands under desks.
        for architecture in ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"] {
            for (from, to) in types.into_iter().flat_map(|from| types.map(|to| (from, to))) {
                let binary =
                    compile(&Options::memory(from, to), architecture).unwrap_or_else(|error| panic!("{error}"));
                assert!(!binary.is_empty(), "{from:?} to {to:?}");
            }
            let widest = vec![bf16::ZERO; TENSOR_WIDTHS.forward];
            let view = View::stored(Data::Bf16(&widest), 1, 1, widest.len()).expect("its size");
            let inputs = Inputs { q: view, k: view, v: view, heads: &heads, score: &plain, bias: None };
            let options = Options::forward(&inputs, TensorCores::Warps, SHARED_MEMORY);
            assert!(options.pass == Pass::TensorForward && options.shared_bytes() <= SHARED_MEMORY, "{options:?}");
            compile(&options, architecture).unwrap_or_else(|error| panic!("{error}"));
            for (dim, v_dim) in [(128, 128), (8, 24), (576, 512)] {
                let wide = 2 * dim.max(v_dim);
                let (f, b, h) = (vec![0.0; wide], vec![bf16::ZERO; wide], vec![f16::ZERO; wide]);
                for (score, data, biased) in
                    [(&plain, Data::Bf16(&b), false), (&all, Data::F16(&h), true), (&alibi, Data::F32(&f), false)]
                {
                    let view = |dim: usize| View::stored(data.slice(0..2 * dim), 2, 1, dim).expect("its size");
                    let bias = biased.then(|| view(2));
                    let inputs = Inputs { q: view(dim), k: view(dim), v: view(v_dim), heads: &heads, score, bias };
                    let passes: HashSet<Options> = HashSet::from([
                        Options::forward(&inputs, TensorCores::None, SHARED_MEMORY),
                        Options::forward(&inputs, TensorCores::Warps, SHARED_MEMORY),
                        Options::backward(&inputs, &view(v_dim), TensorCores::None, SHARED_MEMORY),
                        Options::backward(&inputs, &view(v_dim), TensorCores::Warps, SHARED_MEMORY),
                        Options::delta(&view(v_dim), &view(v_dim)),
                    ]);
                    for options in passes {
                        assert!(options.shared_bytes() <= SHARED_MEMORY, "{options:?}");
                        let binary = compile(&options, architecture).unwrap_or_else(|error| panic!("{error}"));
                        assert!(!binary.is_empty(), "{options:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn kernels_compile_for_tensor_cores_whose_sums_stay_in_registers() {
        if !compiler_is_there() {
            println!("skipped: no NVRTC (libnvrtc.so) on this machine");
            return;
        }
        let heads = HeadMap::grouped(1, 1).expect("they divide");
        let plain = Score::new(1.0);
        let capped = Score { softcap: Some(20.0), ..plain.clone() };
        let data = vec![bf16::ZERO; 100 * 256];
        for (dim, v_dim, score) in
            [(64, 64, &plain), (128, 128, &plain), (128, 64, &plain), (72, 24, &capped), (256, 256, &plain)]
        {
            let view = |dim: usize| View::stored(Data::Bf16(&data[..100 * dim]), 100, 1, dim).expect("its size");
            let inputs = Inputs { q: view(dim), k: view(dim), v: view(v_dim), heads: &heads, score, bias: None };
            let d_out = view(v_dim);
            let passes = [TensorCores::Warps, TensorCores::Warpgroups].map(|tensor| {
                [Options::forward(&inputs, tensor, HOPPER), Options::backward(&inputs, &d_out, tensor, HOPPER)]
            });
            let passes: HashSet<Options> = passes.into_iter().flatten().collect();
            let narrow = dim <= TENSOR_WIDTHS.backward.min(TENSOR_WIDTHS.by_warpgroups);
            assert_eq!(passes.len(), if narrow { 4 } else { 2 }, "{passes:?}");
            for options in passes.iter().filter(|options| options.pass != Pass::Backward) {
                assert!(options.shared_bytes() <= HOPPER, "{options:?}");
                let (binary, said) = compile_with(options, "sm_90", Some("--ptxas-options=-v"))
                    .unwrap_or_else(|error| panic!("{error}"));
                assert!(!binary.is_empty(), "{options:?}");
                if said.is_empty() {
                    println!("skipped: this compiler says nothing about registers");
                    return;
                }
                let spills: Vec<&str> = said.lines().filter(|line| line.contains("bytes spill stores")).collect();
                let none = |line: &&str| line.contains(" 0 bytes spill stores, 0 bytes spill loads");
                assert!(!spills.is_empty() && spills.iter().all(none), "{options:?}: {said}");
                // Products that wait for each other are half as fast.
                assert!(!said.contains("serialized"), "{options:?}: {said}");
            }
        }
    }
}
