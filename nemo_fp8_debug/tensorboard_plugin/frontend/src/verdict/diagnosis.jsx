// The result of `diagnose`: the verdict, its facts, and the findings of the rules.
import {toTensor} from '../address.js';
import {Link, Sentence} from '../components/basics.jsx';
import {TensorLink} from '../story/link.jsx';
import {Table} from '../components/table.jsx';
import {number, titleOf} from '../units.js';

export function Diagnosed({found, unit, run}) {
  const fits = found.findings.filter((finding) => found.about_fp8 !== false || finding.cause === found.cause);
  const others = found.findings.filter((finding) => !fits.includes(finding));
  return (
    <section aria-label="Diagnosis">
      <h2>The verdict in full</h2>
      <p class="verdict"><Sentence text={found.verdict} /></p>
      <Facts found={found} unit={unit} />
      {found.next.length > 0 && <Advice advice={found.next} />}
      {[...found.details, ...found.notes].map((note) => <p key={note} class="soft"><Sentence text={note} /></p>)}
      {fits.length > 0 && <Findings name={`findings of ${run}`} caption="Findings of the rules" findings={fits} unit={unit} />}
      {others.length > 0 && (
        <details>
          <summary>{others.length} other findings: evidence without advice, because FP8 is not the cause</summary>
          <Findings name={`other findings of ${run}`} caption="Consequences of the cause, and unrelated findings" findings={others} unit={unit} />
        </details>
      )}
    </section>
  );
}

function Facts({found, unit}) {
  const {culprit} = found;
  const facts = [
    ['Cause', found.cause.replaceAll('_', ' ')],
    found.confidence && ['Confidence', found.confidence],
    ['Harm', found.harm],
    found.gap && ['Gap', told(found.gap)],
    ['Loss departs', found.divergence_step == null ? 'no' : <Link to={{view: 'timeline', step: found.divergence_step}}>{unit} {found.divergence_step}</Link>],
    culprit && ['Begins in', <TensorLink {...culprit} step={culprit.since} />],
    culprit?.since != null && ['Since', <Link to={toTensor(culprit, {view: 'map', step: culprit.since})}>{unit} {culprit.since}, on the map</Link>],
  ];
  return (
    <dl class="facts">
      {facts.filter(Boolean).map(([term, fact]) => <div key={term}><dt>{term}</dt><dd>{fact}</dd></div>)}
    </dl>
  );
}

/** Return a gap and its interval in words. An infinite gap is null in JSON. */
function told({percent, low, high, visible, of_range: ofRange}) {
  if (percent == null) return 'infinite';
  const signed = (value) => number(value, 3, true);
  return `${signed(percent)}%${ofRange ? " of the loss's range" : ''} (95%: ${signed(low)} to ${signed(high)}%; visible from ${number(visible)}%)`;
}

const Advice = ({advice}) => (
  <>
    <h3>What to do</h3>
    <ul class="advice">{advice.map((sentence) => <li key={sentence}><Sentence text={sentence} /></li>)}</ul>
  </>
);

const titled = (finding) => (finding.layer && finding.role ? titleOf(finding) : 'the run');

function Findings({name, caption, findings, unit}) {
  const columns = [
    {label: 'rule', of: (row) => row.rule, text: true},
    {label: `since (${unit})`, of: (row) => row.since},
    {label: 'about', of: titled, text: true, show: (row) => (row.layer && row.role ? <TensorLink {...row} step={row.since} /> : titled(row))},
    {label: 'means', of: (row) => row.cause.replaceAll('_', ' '), text: true},
    {label: 'strength', of: (row) => row.strength, text: true},
    {label: 'evidence', of: (row) => row.evidence, text: true},
  ];
  return <Table name={name} caption={caption} columns={columns} rows={findings} />;
}
