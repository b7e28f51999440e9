// All styles of the page.
import ofReports from './report/report.css';
import ofRuns from './runs/runs.css';
import ofStory from './story/story.css';
import ofAll from './styles.css';

export const styled = () => document.head.append(Object.assign(document.createElement('style'), {textContent: ofAll + ofStory + ofRuns + ofReports}));
