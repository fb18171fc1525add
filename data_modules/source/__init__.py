"""Read rows from files, folders, URLs, the hub and the samples; each keeps its file and line."""

from data_modules.source.hub import explain_refusal as explain_refusal
from data_modules.source.locating import default_name as default_name
from data_modules.source.locating import is_hub_id as is_hub_id
from data_modules.source.locating import is_remote as is_remote
from data_modules.source.locating import parse_split as parse_split
from data_modules.source.opening import MAX_RAW as MAX_RAW
from data_modules.source.opening import MAX_ROW_BYTES as MAX_ROW_BYTES
from data_modules.source.opening import BadRow as BadRow
from data_modules.source.opening import Budget as Budget
from data_modules.source.opening import Chunk as Chunk
from data_modules.source.opening import ReadLimits as ReadLimits
from data_modules.source.opening import open_regular as open_regular
from data_modules.source.source import find_files as find_files
from data_modules.source.source import fingerprint as fingerprint
from data_modules.source.source import notes_on_files as notes_on_files
from data_modules.source.source import read_chunks as read_chunks
from data_modules.source.source import read_rows as read_rows
from data_modules.source.source import resolved_revision as resolved_revision
from data_modules.source.source import text_bytes as text_bytes
