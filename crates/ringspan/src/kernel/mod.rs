//! Attention of banded tiles on one device: the plain reference, and the blocked CPU kernels.
#![allow(missing_docs)]
//!
//! Shape letters: Tq queries and Tk keys on this rank, H query heads, G key-value heads, D and Dv head widths.



use crate::mask::Band;
use std::ops::Range;

/// A tensor `[tokens, heads, dim]` read in place; rows may lie anywhere, the last dimension is contiguous.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Tokens.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Elements a head.
    pub dim: usize,
    /// Elements from one token to the next.
    pub token_stride: usize,
    /// Elements from one head to the next.
    pub head_stride: usize,
}

impl<'a> View<'a> {
    /// A contiguous `[tokens, heads, dim]` tensor; `None` if `data` has another size.
    pub fn new(data: &'a [f32], tokens: usize, heads: usize, dim: usize) -> Option<Self> {
        (data.len() == tokens * heads * dim).then_some(Self {
            data,
            tokens,
            heads,
            dim,
            token_stride: heads * dim,
            head_stride: dim,
        })
    }

    /// The elements of one token and head.
    pub fn row(&self, token: usize, head: usize) -> &'a [f32] {
        let at = token * self.token_stride + head * self.head_stride;
        &self.data[at..at + self.dim]
    }
}

/// Queries `q` against keys `k` (rows of this rank's queries and of the key block), visible where `band` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// Query rows.
    pub q: Range<usize>,
    /// Key rows.
    pub k: Range<usize>,
    /// Visibility, in indices local to `q` and `k`.
    pub band: Band,
}

/// What changes a score besides the mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Factor on `q . k`; usually 1/sqrt(D).
    pub scale: f32,
}

/// The state of an online softmax over the key blocks seen so far (Milakov and Gimelshein, 2018), all in f32.
#[derive(Debug, Clone)]
pub struct Partial {
    /// Weighted values so far, not yet divided by `sum`: `[Tq, H, Dv]`.
    pub out: Vec<f32>,
    /// Greatest `log2(e) * scale * q.k` so far, or -inf: `[H, Tq]`.
    pub max: Vec<f32>,
    /// Sum of `2^(score - max)` so far: `[H, Tq]`.
    pub sum: Vec<f32>,
}

impl Partial {
    /// Nothing seen yet.
    pub fn new(tokens: usize, heads: usize, v_dim: usize) -> Self {
        Self {
            out: vec![0.0; tokens * heads * v_dim],
            max: vec![f32::NEG_INFINITY; heads * tokens],
            sum: vec![0.0; heads * tokens],
        }
    }
}
pub struct Kernel; pub struct HeadMap(Vec<usize>);
impl HeadMap { pub fn new(m: Vec<usize>, _n: usize) -> crate::Result<Self> { Ok(Self(m)) } }
impl Partial { pub fn finish(mut self, t: usize, h: usize, d: usize) -> (Vec<f32>, Vec<f32>) {
  let mut lse = vec![f32::NEG_INFINITY; h*t];
  for i in 0..t { for a in 0..h { let s=self.sum[a*t+i]; if s>0. { lse[a*t+i]=(self.max[a*t+i]+s.log2())*std::f32::consts::LN_2; for x in &mut self.out[(i*h+a)*d..][..d] { *x/=s } } } }
  (self.out,lse) } }
pub fn delta(out:&[f32], d_out: View)->Vec<f32>{ let (t,h,d)=(d_out.tokens,d_out.heads,d_out.dim); let mut r=vec![0.;h*t]; for i in 0..t { for a in 0..h { r[a*t+i]=d_out.row(i,a).iter().zip(&out[(i*h+a)*d..]).map(|(x,y)|x*y).sum() } } r }
impl Kernel { pub fn new(_:usize)->Self{Kernel}
 pub fn forward_workspace(&self,_:View,_:View,_:View,_:&HeadMap,_:&[Tile])->u64{0}
 pub fn backward_workspace(&self,_:View,_:View,_:View,_:&HeadMap,_:&[Tile])->u64{0}
 pub fn forward(&self,q:View,k:View,v:View,m:&HeadMap,tiles:&[Tile],sc:&Score,p:&mut Partial){ let (t,h)=(q.tokens,q.heads);
  for tile in tiles { for (i0,i) in tile.q.clone().enumerate() { for a in 0..h { for (j0,j) in tile.k.clone().enumerate() { if !tile.band.sees(i0,j0){continue}
   let s:f32=q.row(i,a).iter().zip(k.row(j,m.0[a])).map(|(x,y)|x*y).sum::<f32>()*sc.scale*std::f32::consts::LOG2_E;
   let (mx,sm)=(&mut p.max[a*t+i],&mut p.sum[a*t+i]); let n=mx.max(s); let al=(*mx-n).exp2(); let w=(s-n).exp2(); *mx=n; *sm=*sm*al+w;
   for (o,x) in p.out[(i*h+a)*v.dim..][..v.dim].iter_mut().zip(v.row(j,m.0[a])) { *o=*o*al+w*x } } } } } }
 #[allow(clippy::too_many_arguments)]
 pub fn backward(&self,q:View,k:View,v:View,m:&HeadMap,tiles:&[Tile],sc:&Score,lse:&[f32],delta:&[f32],d_out:View,dq:&mut [f32],dk:&mut [f32],dv:&mut [f32]){ let (t,h,g)=(q.tokens,q.heads,k.heads); let d=q.dim; let e=v.dim;
  for tile in tiles { for (i0,i) in tile.q.clone().enumerate() { for a in 0..h { for (j0,j) in tile.k.clone().enumerate() { if !tile.band.sees(i0,j0){continue}
   let b=m.0[a]; let s:f32=q.row(i,a).iter().zip(k.row(j,b)).map(|(x,y)|x*y).sum::<f32>()*sc.scale; let p=(s-lse[a*t+i]).exp();
   let dp:f32=d_out.row(i,a).iter().zip(v.row(j,b)).map(|(x,y)|x*y).sum(); let ds=p*(dp-delta[a*t+i])*sc.scale;
   for c in 0..e { dv[(j*g+b)*e+c]+=p*d_out.row(i,a)[c]; }
   for c in 0..d { dk[(j*g+b)*d+c]+=ds*q.row(i,a)[c]; dq[(i*h+a)*d+c]+=ds*k.row(j,b)[c]; } } } } } }
}
pub mod reference {
 #[derive(Clone,Copy)] pub struct Shape { pub batch:usize,pub queries:usize,pub keys:usize,pub heads:usize,pub kv_heads:usize,pub dim:usize,pub v_dim:usize }
 type See<'a>=&'a dyn Fn(usize,usize,usize)->bool;
 fn probs(s:Shape,q:&[f32],k:&[f32],sc:f64,see:See,b:usize,i:usize,a:usize)->(Vec<f64>,f64){ let g=a/(s.heads/s.kv_heads);
  let sc:Vec<f64>=(0..s.keys).map(|j| if see(b,i,j){ (0..s.dim).map(|c| q[((b*s.queries+i)*s.heads+a)*s.dim+c] as f64*k[((b*s.keys+j)*s.kv_heads+g)*s.dim+c] as f64).sum::<f64>()*sc } else {f64::NEG_INFINITY}).collect();
  let m=sc.iter().cloned().fold(f64::NEG_INFINITY,f64::max); if m==f64::NEG_INFINITY { return (vec![0.;s.keys],m) }
  let l:f64=sc.iter().map(|x|(x-m).exp()).sum(); (sc.iter().map(|x|(x-m).exp()/l).collect(), m+l.ln()) }
 pub fn attention(s:Shape,q:&[f32],k:&[f32],v:&[f32],sc:f64,see:See)->(Vec<f64>,Vec<f64>){ let mut o=vec![0.;s.batch*s.queries*s.heads*s.v_dim]; let mut l=vec![0.;s.batch*s.heads*s.queries];
  for b in 0..s.batch { for a in 0..s.heads { for i in 0..s.queries { let (p,x)=probs(s,q,k,sc,see,b,i,a); l[(b*s.heads+a)*s.queries+i]=x; let g=a/(s.heads/s.kv_heads);
   for j in 0..s.keys { for c in 0..s.v_dim { o[((b*s.queries+i)*s.heads+a)*s.v_dim+c]+=p[j]*v[((b*s.keys+j)*s.kv_heads+g)*s.v_dim+c] as f64 } } }}} (o,l) }
 pub fn backward(s:Shape,q:&[f32],k:&[f32],v:&[f32],sc:f64,see:See,d:&[f32])->(Vec<f64>,Vec<f64>,Vec<f64>){
  let (mut dq,mut dk,mut dv)=(vec![0.;q.len()],vec![0.;k.len()],vec![0.;v.len()]);
  for b in 0..s.batch { for a in 0..s.heads { for i in 0..s.queries { let (p,_)=probs(s,q,k,sc,see,b,i,a); let g=a/(s.heads/s.kv_heads); let r=(b*s.queries+i)*s.heads+a;
   let dp:Vec<f64>=(0..s.keys).map(|j|(0..s.v_dim).map(|c| d[r*s.v_dim+c] as f64*v[((b*s.keys+j)*s.kv_heads+g)*s.v_dim+c] as f64).sum()).collect();
   let de:f64=p.iter().zip(&dp).map(|(x,y)|x*y).sum();
   for j in 0..s.keys { let kr=(b*s.keys+j)*s.kv_heads+g; let ds=p[j]*(dp[j]-de)*sc; for c in 0..s.v_dim { dv[kr*s.v_dim+c]+=p[j]*d[r*s.v_dim+c] as f64 }
    for c in 0..s.dim { dq[r*s.dim+c]+=ds*k[kr*s.dim+c] as f64; dk[kr*s.dim+c]+=ds*q[r*s.dim+c] as f64 } } }}} (dq,dk,dv) }
}
