// All styles of the page.
import ofGlossary from './glossary/glossary.css';
import ofReports from './report/report.css';
import ofRuns from './runs/runs.css';
import ofStory from './story/story.css';
import ofAll from './styles.css';

export const styled = () => document.head.append(Object.assign(document.createElement('style'), {textContent: ofAll + ofGlossary + ofStory + ofRuns + ofReports}));
