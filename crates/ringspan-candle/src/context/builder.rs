//! Builds the context of a model whose sequences are distributed over ranks.

use super::{Context, QkvFormat};
use candle_core::{Result, bail};
use ringspan::attention::{Group, Wire};
use ringspan::comm::Communicator;
use ringspan::comm::agree::agree;
use ringspan::mesh::Grid;
use ringspan::schedule::{Machine, StrategyChoice};
use ringspan::{Documents, Kernel, Layout, LayoutKind, Mask, Rank, StrategyKind};
use std::collections::hash_map::DefaultHasher;
use std::fmt::{self, Debug, Write};
use std::hash::Hasher;
use std::sync::Arc;

/// Says how sequences are distributed over ranks and how they attend to each other. Only the sequences must be given, by
/// [`batch`](Self::batch) or [`documents`](Self::documents).
///
/// All ranks must build their contexts in the same order, with the same settings.
///
/// ```
/// use ringspan::{Documents, Mask, StrategyKind, World};
/// use ringspan::attention::Wire;
/// use ringspan_candle::{Context, QkvFormat};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// let tokens = World::threads(4)?.run(|rank| {
///     let context = Context::builder(rank)
///         .documents(Documents::from_rows(&[vec![5, 2], vec![6]], 8)?)   // two packed documents, and one; the rest is padding
///         .mask(Mask::causal().window(Some(3), None))
///         .grid((2, 2))                                                  // rings of 2 ranks, heads over 2 ranks
///         .strategy(StrategyKind::Halo)
///         .wire(Wire::Bf16)
///         .qkv_format(QkvFormat::Bhsd)
///         .build()?;
///     Ok::<_, Error>((context.layout().tokens(rank.index()), context.global_tokens()))
/// })?;
/// assert_eq!(tokens.iter().map(|(own, _)| own).sum::<usize>(), 13);
/// assert_eq!(tokens[0].1, 13);
/// # Ok::<_, Error>(())
/// ```
pub struct ContextBuilder {
    communicator: Arc<dyn Communicator>,
    kernel: Kernel,
    documents: Option<Documents>,
    key_documents: Option<Documents>,
    layout: LayoutKind,
    key_layout: Option<LayoutKind>,
    mask: Mask,
    strategy: StrategyChoice,
    machine: Option<Machine>,
    grid: Option<Grid>,
    head_chunks: usize,
    wire: Option<Wire>,
    qkv_format: QkvFormat,
    threads: usize,
}

impl Context {
    /// A builder for the sequences of the ranks of a world, on the CPU.
    pub fn builder(rank: &Rank) -> ContextBuilder {
        let builder = ContextBuilder::new(rank.communicator().clone(), rank.kernel());
        ContextBuilder { threads: rank.threads(), ..builder }
    }
}

impl ContextBuilder {
    /// A builder for ranks that communicate by `communicator` and compute attention by `kernel`, for example on a GPU (see
    /// [`RankDevice::kernel`](crate::RankDevice::kernel)).
    pub fn new(communicator: Arc<dyn Communicator>, kernel: Kernel) -> Self {
        Self {
            communicator,
            kernel,
            documents: None,
            key_documents: None,
            layout: LayoutKind::Zigzag,
            key_layout: None,
            mask: Mask::full(),
            strategy: StrategyKind::Ring.into(),
            machine: None,
            grid: None,
            head_chunks: 1,
            wire: None,
            qkv_format: QkvFormat::default(),
            threads: 1,
        }
    }

    /// `rows` sequences of `tokens` tokens each. Neither must be divisible by anything.
    #[must_use]
    pub fn batch(self, rows: usize, tokens: usize) -> Self {
        self.documents(Documents::batch(rows, tokens))
    }

    /// Sequences with padding, or with several documents that do not see each other.
    #[must_use]
    pub fn documents(self, documents: Documents) -> Self {
        Self { documents: Some(documents), ..self }
    }

    /// The sequences of keys and values, for cross attention: as many documents as there are of queries. By default keys
    /// belong to the same tokens as queries.
    ///
    /// A rank holds the keys that a context of its own, built for these documents alone with the same layout, would give it: the
    /// output of an encoder with that context can be attended to as it is. Only [`LayoutKind::Balanced`] distributes keys in
    /// another way, contiguously.
    #[must_use]
    pub fn key_documents(self, documents: Documents) -> Self {
        Self { key_documents: Some(documents), ..self }
    }

    /// How tokens are distributed over ranks; zigzag by default, which gives all ranks the same work under a causal mask.
    #[must_use]
    pub fn layout(self, layout: LayoutKind) -> Self {
        Self { layout, ..self }
    }

    /// How the tokens of keys are distributed, if not like those of queries: [`Context::shard_keys`] follows it.
    #[must_use]
    pub fn key_layout(self, layout: LayoutKind) -> Self {
        Self { key_layout: Some(layout), ..self }
    }

    /// The mask of [`Context::attention`]; by default each query sees all keys of its document.
    #[must_use]
    pub fn mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// The strategy by which queries reach the keys of other ranks; a ring by default. [`StrategyChoice::Auto`] takes
    /// the cheapest.
    #[must_use]
    pub fn strategy(self, strategy: impl Into<StrategyChoice>) -> Self {
        Self { strategy: strategy.into(), ..self }
    }

    /// The speeds by which strategy `auto` chooses; by default those of [`Machine::cpu`].
    #[must_use]
    pub fn machine(self, machine: Machine) -> Self {
        Self { machine: Some(machine), ..self }
    }

    /// The sizes of the ring and Ulysses axes; by default all ranks form a ring.
    #[must_use]
    pub fn grid(self, grid: impl Into<Grid>) -> Self {
        Self { grid: Some(grid.into()), ..self }
    }

    /// Number of parts in which a Ulysses rank exchanges and computes its heads, so that one overlaps the other.
    #[must_use]
    pub fn head_chunks(self, chunks: usize) -> Self {
        Self { head_chunks: chunks, ..self }
    }

    /// The type in which queries, keys and values travel; by default their own.
    #[must_use]
    pub fn wire(self, wire: Wire) -> Self {
        Self { wire: Some(wire), ..self }
    }

    /// The order of dims of queries, keys, values and outputs; `[B, T, H, D]` by default.
    #[must_use]
    pub fn qkv_format(self, qkv_format: QkvFormat) -> Self {
        Self { qkv_format, ..self }
    }

    /// Makes the context. All ranks must call this at the same time.
    ///
    /// # Errors
    /// No sequences; settings that do not fit each other or the number of ranks, with the numbers; ranks with other settings;
    /// failures of other ranks.
    pub fn build(self) -> Result<Context> {
        let ranks = self.communicator.size();
        let Some(documents) = self.documents else {
            bail!(
                "a context needs sequences: give batch(rows, tokens), or documents(..) with padding or packed sequences"
            );
        };
        let grid = self.grid.unwrap_or(Grid::new(ranks, 1));
        if self.head_chunks == 0 || (self.head_chunks > 1 && grid.ulysses == 1) {
            bail!(
                "head_chunks({}) cuts the exchange of heads into parts, but in a grid of {grid} there is {}",
                self.head_chunks,
                if self.head_chunks == 0 { "at least one part" } else { "no such exchange" }
            );
        }
        if self.machine.is_some() && !self.strategy.is_auto() {
            bail!("machine(..) has an effect with strategy auto only, and the strategy is {}", self.strategy);
        }
        if let Some(layout @ LayoutKind::Balanced(_)) = self.key_layout {
            bail!(
                "key_layout({layout}) is for queries, whose work it balances: contiguous, zigzag, striped:K are for keys"
            );
        }
        let on_cpu = self.kernel.is_cpu();
        if self.strategy.is_auto() && self.machine.is_none() && !on_cpu {
            bail!("strategy auto on a GPU needs machine(..): the speed of attention and of the links between ranks");
        }
        let keys = self.key_documents.as_ref().unwrap_or(&documents);
        let layouts = Layout::pair(self.layout, &documents, keys, &self.mask, ranks);
        let (query, mut key) = layouts.map_err(candle_core::Error::wrap)?;
        if let Some(layout) = self.key_layout {
            key = Layout::new(layout, keys, ranks).map_err(candle_core::Error::wrap)?;
        }
        let wire = self.wire.map_or("that of the tensors".into(), |wire| format!("{wire:?}"));
        let machine = self.machine.unwrap_or(Machine::cpu(self.threads));
        let chosen_for = if self.strategy.is_auto() { format!("{machine:?}") } else { "none".into() };
        let settings = [
            ("sequences", summary(&documents)),
            ("sequences of keys", summary(keys)),
            ("layout", self.layout.to_string()),
            ("layout of keys", self.key_layout.unwrap_or(self.layout).to_string()),
            ("mask", digest(&self.mask)),
            ("strategy", self.strategy.to_string()),
            ("grid", grid.to_string()),
            ("head_chunks", self.head_chunks.to_string()),
            ("wire", wire),
            ("machine for strategy auto", chosen_for),
        ];
        agree(&*self.communicator, &settings.map(|(name, value)| (name.to_owned(), value)))
            .map_err(candle_core::Error::wrap)?;
        let group = Group::new(self.communicator, grid, self.kernel).map_err(candle_core::Error::wrap)?;
        let group = Arc::new(if let Some(wire) = self.wire { group.with_wire(wire) } else { group });
        Ok(Context {
            strategy: self.strategy,
            machine,
            head_chunks: self.head_chunks,
            mask: self.mask,
            qkv_format: self.qkv_format,
            key_layout: Arc::new(key),
            ..Context::new(group, Arc::new(query), StrategyKind::Ring)?
        })
    }
}

/// Documents as a text that ranks can compare: their sizes for the reader, and a hash of where each lies.
fn summary(documents: &Documents) -> String {
    let (count, tokens, row_len) = (documents.len(), documents.tokens(), documents.row_len());
    format!("{count} documents of {tokens} tokens in rows of {row_len} (hash {:016x})", hash(documents))
}

/// A value as a text that ranks can compare: as much of it as fits in a line, and a hash of all.
fn digest(value: &impl Debug) -> String {
    let text: String = format!("{value:?}").chars().take(200).collect();
    format!("{text} (hash {:016x})", hash(value))
}

fn hash(value: &impl Debug) -> u64 {
    let mut text = HashedText(DefaultHasher::new());
    // Hashing cannot fail.
    let _ = write!(text, "{value:?}");
    text.0.finish()
}

/// Hashes a text while it is written, since the text of many documents is long.
struct HashedText(DefaultHasher);

impl Write for HashedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}
