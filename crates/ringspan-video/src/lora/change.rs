//! The changes that adapters make to a transformer: products added to the outputs of linear layers, and differences
//! added to parameters.

use super::LoraSource;
use super::file::LoraFile;
use super::tensor_name::{ModuleNames, Role};
use crate::error::Result;
use candle_core::Tensor;
use ringspan_candle::model::ModelParameters;
use ringspan_candle::{AdapterSize, Adapters};
use std::collections::{BTreeMap, BTreeSet};

/// The adapters of a transformer, from one or several files. Their matrices stay on disk until weights are read.
#[derive(Debug, Default)]
pub(crate) struct TransformerChange {
    files: Vec<LoraFile>,
    /// The products of linear layers: several adapters of a layer are one, whose rank is the sum of theirs.
    products: BTreeMap<String, Vec<Product>>,
    /// Tensors that are added to parameters, by the parameters' names.
    differences: BTreeMap<String, Vec<Difference>>,
}

/// The matrices of an adapter of a linear layer.
#[derive(Debug)]
struct Product {
    file: usize,
    names: [String; 2],
    rank: usize,
    factor: f64,
}

/// A tensor that is added to a parameter, or two whose product is.
#[derive(Debug)]
struct Difference {
    file: usize,
    names: Vec<String>,
    factor: f64,
}

impl TransformerChange {
    /// Reads which products and differences the adapters of these sources add to a transformer with these parameters.
    pub(crate) fn open(sources: &[LoraSource], parameters: &ModelParameters) -> Result<Self> {
        let names = ModuleNames::new(parameters);
        let shapes = parameters.iter().map(|parameter| (parameter.name.clone(), parameter.shape.clone())).collect();
        let linear: BTreeSet<_> = parameters.linear_layers().map(|layer| layer.name.clone()).collect();
        let mut change = Self::default();
        for source in sources {
            let file = LoraFile::open(source, &names)?;
            for (module, roles) in &file.modules {
                change.add(&file, module, roles, &shapes, &linear)?;
            }
            change.files.push(file);
        }
        Ok(change)
    }

    /// Adds a file's tensors for a module.
    fn add(
        &mut self,
        file: &LoraFile,
        module: &str,
        roles: &BTreeMap<Role, String>,
        shapes: &BTreeMap<String, Vec<usize>>,
        linear: &BTreeSet<String>,
    ) -> Result<()> {
        let (number, scale) = (self.files.len(), file.scale);
        let shape_of = |name: &String| file.tensors.shape(name).unwrap_or_default().to_vec();
        let (weight, bias) = (format!("{module}.weight"), format!("{module}.bias"));
        let weight = if shapes.contains_key(&weight) { weight } else { module.to_owned() };
        let no_effect = |name: &String, why: &str| file.refuse(format!("tensor {name} has no effect: {why}"));
        let mut factor = scale;
        match (roles.get(&Role::Down), roles.get(&Role::Up)) {
            (Some(down), Some(up)) => {
                let (of_down, of_up, whole) = (shape_of(down), shape_of(up), &shapes[&weight]);
                let rank = of_down.first().copied().unwrap_or(0);
                let counts = [&of_down, &of_up, whole].map(|shape| shape.iter().skip(1).product::<usize>());
                let [inputs, ranks, wanted] = counts;
                if rank == 0 || ranks != rank || inputs != wanted || of_up.first() != whole.first() {
                    let problem =
                        format!("tensors {down} {of_down:?} and {up} {of_up:?} do not fit {weight} {whole:?}");
                    return Err(file.refuse(problem));
                }
                factor *= file.factor(module, rank)?;
                let names = [down.clone(), up.clone()];
                if linear.contains(module) {
                    let product = Product { file: number, names, rank, factor };
                    self.products.entry(module.to_owned()).or_default().push(product);
                } else {
                    self.differ(weight.clone(), Difference { file: number, names: names.into(), factor });
                }
            }
            (Some(alone), None) | (None, Some(alone)) => {
                return Err(no_effect(alone, "the other matrix of the product is missing"));
            }
            (None, None) => {
                if let Some(name) = roles.get(&Role::Alpha).or_else(|| roles.get(&Role::UpBias)) {
                    return Err(no_effect(name, "there is no product to which it belongs"));
                }
            }
        }
        let added = [
            (Role::Difference, weight, scale, "the model has no such weight"),
            (Role::BiasDifference, bias.clone(), scale, "the model has no bias there"),
            (Role::UpBias, bias, factor, "the model has no bias there"),
        ];
        for (role, parameter, factor, why) in added {
            let Some(name) = roles.get(&role) else { continue };
            let Some(wanted) = shapes.get(&parameter) else { return Err(no_effect(name, why)) };
            if shape_of(name) != *wanted {
                let found = shape_of(name);
                return Err(file.refuse(format!("tensor {name} {found:?} does not fit {parameter} {wanted:?}")));
            }
            self.differ(parameter, Difference { file: number, names: vec![name.clone()], factor });
        }
        Ok(())
    }

    fn differ(&mut self, parameter: String, difference: Difference) {
        self.differences.entry(parameter).or_default().push(difference);
    }

    /// The sizes of the adapters of linear layers. Their factors are in the matrices B.
    pub(crate) fn adapters(&self) -> Adapters {
        let size = |products: &Vec<Product>| products.iter().map(|product| product.rank).sum();
        let sizes = self.products.iter().map(|(layer, products)| {
            let rank = size(products);
            (layer.clone(), AdapterSize { rank, scale: 1.0 })
        });
        Adapters { sizes: sizes.collect(), ..Adapters::none() }
    }

    /// The adapted linear layers.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &str> {
        self.products.keys().map(String::as_str)
    }

    /// The matrices A `[R, in]` and B `[out, R]` of a linear layer, in f32: those of all files, one after the other.
    pub(crate) fn matrices(&self, layer: &str) -> Result<[Tensor; 2]> {
        let (mut downs, mut ups) = (Vec::new(), Vec::new());
        for Product { file, names: [down, up], factor, .. } in self.products.get(layer).into_iter().flatten() {
            let tensors = &self.files[*file].tensors;
            downs.push(tensors.read(down)?.flatten_from(1)?);
            ups.push((tensors.read(up)?.flatten_from(1)? * *factor)?);
        }
        Ok([Tensor::cat(&downs, 0)?, Tensor::cat(&ups, 1)?])
    }

    /// Whether something is added to a parameter.
    pub(crate) fn changes(&self, parameter: &str) -> bool {
        self.differences.contains_key(parameter)
    }

    /// A parameter in f32, with the differences of all adapters added to it.
    pub(crate) fn changed(&self, parameter: &str, mut value: Tensor) -> Result<Tensor> {
        for Difference { file, names, factor } in self.differences.get(parameter).into_iter().flatten() {
            let tensors = &self.files[*file].tensors;
            let difference = match &names[..] {
                [down, up] => tensors.read(up)?.flatten_from(1)?.matmul(&tensors.read(down)?.flatten_from(1)?)?,
                names => {
                    names.first().map_or_else(|| value.zeros_like().map_err(Into::into), |name| tensors.read(name))?
                }
            };
            value = (value.as_ref() + (difference.reshape(value.shape())? * *factor)?)?;
        }
        Ok(value)
    }
}
