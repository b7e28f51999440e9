// Names that may go over to the next line between their parts, and nowhere else.
import {Fragment} from 'preact';

const BETWEEN_PARTS = /(?<=[._,]|\w\()(?=[A-Za-z])/;

export const Breakable = ({text}) => String(text).split(BETWEEN_PARTS).map((part, i) => <Fragment key={i}>{i > 0 && <wbr />}{part}</Fragment>);
