// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// generatedSuffix ends the name of a list that was generated from the configuration of a single plugin. Its
// first byte sorts before the dot of an extension, so the runtime uses the list and not the other file.
const generatedSuffix = "-made-by-ip-masq.conflist"

// generatedPath returns the path of the list that is generated from a .conf or .json file.
func generatedPath(conf string) string {
	return strings.TrimSuffix(conf, filepath.Ext(conf)) + generatedSuffix
}

// listOfSingle returns the list for a single plugin's configuration, with its name and CNI version, as in
// libcni's ConfListFromConf.
func listOfSingle(conf config.Conflist) []byte {
	const format = "{\"name\":%q,\"cniVersion\":%q,\"plugins\":[\n%s\n]}\n"
	return fmt.Appendf(nil, format, conf.Network, conf.CNIVersion, bytes.TrimSpace(conf.Doc))
}

// originalPath returns the path of the configuration that a list was generated from, "" if it is gone. The
// path is that of a generated list.
func originalPath(path string) string {
	for _, ext := range []string{".conf", ".json"} {
		conf := strings.TrimSuffix(path, generatedSuffix) + ext
		if _, err := os.Lstat(conf); err == nil {
			return conf
		}
	}
	return ""
}

// isGenerated reports whether ip-masq generated a list, and nobody has changed more than the plugin entry
// since. A list that somebody else has changed, such as another program that appended its plugin, is a list
// like others from then on: it neither follows the other file nor is removed with it. Of a list without a
// record, such as after the state was lost, the form tells: nobody else writes exactly that.
func isGenerated(list config.Conflist, record entryRecord) bool {
	_, isRecorded := record.Generated[list.File]
	return isKnownGenerated(list, record) || !isRecorded && hasGeneratedForm(list)
}

// hasGeneratedForm reports whether a list has the name and, byte for byte, the form of a generated one.
func hasGeneratedForm(list config.Conflist) bool {
	hasName := strings.HasSuffix(list.File, generatedSuffix)
	hasOnePlugin := len(list.Types) > 0 && len(list.Types) == len(list.Entries)+1
	if !hasName || !hasOnePlugin {
		return false
	}
	without, err := setEntry(list.File, list.Doc, nil, false)
	conf := config.Conflist{Network: list.Network, CNIVersion: list.CNIVersion, Doc: list.Plugins[0]}
	return err == nil && bytes.Equal(without, listOfSingle(conf))
}

// isKnownGenerated reports whether a list is what ip-masq generated last, by the record, or would generate
// now.
func isKnownGenerated(list config.Conflist, record entryRecord) bool {
	if !strings.HasSuffix(list.File, generatedSuffix) {
		return false
	}
	digest := generatedDigest(list)
	if digest == "" {
		return false
	}
	if digest == record.Generated[list.File] {
		return true
	}
	from := originalPath(list.File)
	if from == "" {
		return false
	}
	doc, _, err := safefile.ReadFile(from, maxSize)
	conf := config.ParseConflist(from, doc)
	if cmp.Or(err, conf.Err) != nil {
		return false
	}
	return digest == generatedDigest(config.ParseConflist(list.File, listOfSingle(conf)))
}

// generatedDigest returns the digest of a list's value without the plugin entry, "" if there is none. Order
// and spacing do not count: programs that insert a plugin and remove it again format the file.
func generatedDigest(list config.Conflist) string {
	without, err := setEntry(list.File, list.Doc, nil, false)
	if err != nil {
		return ""
	}
	var value any
	if json.Unmarshal(without, &value) != nil {
		return ""
	}
	text, err := json.Marshal(value)
	if err != nil {
		return ""
	}
	return config.DigestOf(text)
}

// ErrTaken reports that another file has the name of the list that is to be generated.
var ErrTaken = errors.New("it is not a list that ip-masq made; give it another name")

// checkNotTaken returns an error if there is a file where a list is to be generated: errChanged if the
// network has another file now, as after another process of ip-masq has generated the list, otherwise an
// ErrTaken.
func (e Editor) checkNotTaken(conf string) error {
	path := generatedPath(conf)
	if _, err := os.Lstat(path); err != nil {
		return nil //nolint:nilerr // it is missing, or writing it says why not
	}
	taken := ErrTaken
	now, err := e.find()
	if err != nil || now.Path != conf { // the next attempt tells the error
		taken = errChanged
	}
	return fmt.Errorf("make a list of %s: %s exists: %w",
		policy.Printable(conf), policy.Printable(path), taken)
}

// GeneratedFinding returns the finding about a list that ip-masq generated, that somebody else has
// changed, and that does not have what the other file says now; nil if there is none.
func (e Editor) GeneratedFinding() *Finding {
	n, err := e.find()
	if err != nil {
		return nil
	}
	why := divergence(n.Conflist, readEntryRecord(e.RecordPath))
	if why == "" {
		return nil
	}
	return &Finding{ListChanged, why}
}

// divergence returns why a list that ip-masq generated does not follow the other file any more, "" if it
// does.
func divergence(list config.Conflist, record entryRecord) string {
	_, isRecorded := record.Generated[list.File]
	if !isRecorded || len(list.Plugins) == 0 || isGenerated(list, record) {
		return ""
	}
	from := originalPath(list.File)
	if from == "" {
		return fmt.Sprintf("%s was made of a file that is gone, and another program has changed "+
			"the list since", policy.Printable(list.File))
	}
	doc, _, err := safefile.ReadFile(from, maxSize)
	conf := config.ParseConflist(from, doc)
	if cmp.Or(err, conf.Err) != nil {
		return ""
	}
	for _, plugin := range list.Plugins {
		if len(differences(doc, plugin)) == 0 {
			return ""
		}
	}
	made := generatedDigest(config.ParseConflist(list.File, listOfSingle(conf)))
	if made == record.Generated[list.File] {
		return fmt.Sprintf("%s was made of %s, and another program has changed that plugin in the list",
			policy.Printable(list.File), policy.Printable(from))
	}
	return fmt.Sprintf("%s was made of %s, which has changed, and another program has changed the list",
		policy.Printable(list.File), policy.Printable(from))
}
