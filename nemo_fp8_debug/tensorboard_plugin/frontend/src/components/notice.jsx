// What there is to say where there is nothing to show.

export const Notice = ({title, children}) => (
  <div class="notice" role="status">
    {title && <h2>{title}</h2>}
    {children}
  </div>
);

export const Problem = ({error}) => (
  <div class="notice problem" role="alert">
    <p>{error}</p>
  </div>
);

/** While an answer is awaited, a problem, or what it is for. */
export function Answered({answer, children}) {
  if (answer.error) return <Problem error={answer.error} />;
  if (!answer.data) return <p class="soft" role="status">Reading the record …</p>;
  return children(answer.data);
}

/** A sentence in which what is between backticks is code. */
export const Sentence = ({text}) => text.split('`').map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part));
