// The result of `recommend`: a change for each operand, its errors before and after, the cost, and files that apply the
// changes.
import {TensorLink} from '../story/link.jsx';
import {Sentence, Snippet} from '../components/basics.jsx';
import {Table} from '../components/table.jsx';
import {number, titleOf} from '../units.js';

const percent = (share) => `${number(100 * share)}%`;

export function Recommended({found, snippets, aboutFp8, run}) {
  return (
    <section aria-label="Recommendation">
      <h2>Recommended changes of FP8</h2>
      {found?.findings.length ? <Changes found={found} snippets={snippets} run={run} /> : <p>{nothing(aboutFp8)}</p>}
    </section>
  );
}

const nothing = (aboutFp8) =>
  aboutFp8 !== false ? 'No operand is to blame, so there is nothing to change.' : 'Nothing to change: FP8 is not the cause of the divergence.';

function Changes({found, snippets, run}) {
  const {before, after} = found.fp8_coverage;
  const asIf = found.quantization === 'quantized' ? '' : ', as if all measured operands were quantized';
  return (
    <>
      <Findings found={found} run={run} />
      {before != null && after != null && <p>FP8 coverage, share of the GEMMs' FLOPs{asIf}: {percent(before)} → {percent(after)}.</p>}
      {found.ends && <p>{atTheEnds(found.ends)}</p>}
      {found.notes.map((note) => <p key={note} class="soft"><Sentence text={note} /></p>)}
      {found.plan.length ? <h3>Ready to use</h3> : <p>There is nothing to change.</p>}
      {snippets.map((snippet) => <Snippet key={snippet.name} {...snippet} />)}
    </>
  );
}

function atTheEnds({start, end, coverage}) {
  const kept = coverage == null ? '' : `, with a coverage of ${percent(coverage)}`;
  return `All operands that leave FP8 are at the ends of the model. You can also leave the first ${start} and the last ${end} blocks in BF16${kept}.`;
}

function Findings({found, run}) {
  const {relative_error: error, underflow_pct: underflow, overflow_pct: overflow} = found.budget;
  const errors = (label, metric) => ({
    label,
    from: (row) => row.options[0].errors?.[metric],
    of: (row) => row.chosen.errors?.[metric],
  });
  const columns = [
    {label: 'tensor', of: titleOf, text: true, show: (row) => <TensorLink {...row} />},
    {label: 'why', of: (row) => row.why, text: true},
    {label: found.quantization === 'quantized' ? 'in use' : 'measured under', of: (row) => row.options[0].recipe, text: true},
    {label: 'change', of: (row) => (row.chosen.approximate ? `${row.change} (approximate)` : row.change), text: true},
    errors('relative error', 'relative_error'),
    errors('underflow (%)', 'underflow_pct'),
    errors('overflow (%)', 'overflow_pct'),
    {label: 'coverage cost (% of FLOPs)', of: (row) => (row.cost == null ? null : 100 * row.cost)},
  ];
  const caption = `The cheapest changes within the limits (relative error ${error}, underflow ${underflow}%, overflow ${overflow}%); worst samples of the later half`;
  return <Table name={`changes for ${run}`} caption={caption} columns={columns} rows={found.findings} first={15} />;
}
