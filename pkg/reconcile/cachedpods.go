// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// cachedPods records pods that started before the plugin entry was in the conflist, from the files of the
// runtime's cache.
//
// The maps are by the name of a file in the cache. A file that was read may be undecided, and one that was
// decided about has a record only if its pod was to be recorded.
type cachedPods struct {
	read     map[string]cachedFile       // files, as they were when they were read last
	decided  map[string]time.Time        // files that were decided about, with their times then
	recorded map[string]store.Attachment // files whose pods have a record
	// unrecorded are the pods that should have a record and have none, as the last sync found them.
	unrecorded []UnrecordedPod

	hasAllRecords bool     // recorded has all records that were on disk
	conflists     []string // the name and the text of each one with a plugin entry, in turn
	// awaitRules tells that pods may not be in the rules yet: recorded ones and, at the start, those of ADDs that
	// passed beside a document that could not be read. Node.sync clears it.
	awaitRules bool
}

// cachedFile is what a file in the cache said when it was read. While the file has the same time, only the
// network namespace is looked at again: to read and decode the files of 1,000 pods takes longer than to
// repair the rules.
type cachedFile struct {
	written time.Time
	pod     podinfo.Cached // without its addresses and its configuration
}

// cacheSync is the result of a sync of the records with the runtime's cache.
type cacheSync struct {
	// changed tells that the rules may not be those of the records any more: some records changed, or some are
	// new to this process, and the one before may have been killed between a record and its rules.
	changed  bool
	warnings []error
}

// UnrecordedPod is a pod of the runtime's cache without a record, so that it is in no namespace.
type UnrecordedPod struct {
	File   string `json:"file"`             // in the cache
	Reason string `json:"reason"`           // the same for all pods of one cause
	Detail string `json:"detail,omitempty"` // of this pod
}

// CacheEvents tells which events of the runtime's cache concern syncs. It is for one goroutine.
type CacheEvents struct {
	node       *Node
	withoutADD map[string]time.Time // the files whose attachment had no ADD of the plugin, with their times
	withADD    map[string]time.Time // those whose attachment had one
}

// CacheEvents returns the events of the node's cache. Concern reports all files at first.
func (n *Node) CacheEvents() *CacheEvents {
	return &CacheEvents{node: n, withoutADD: map[string]time.Time{}, withADD: map[string]time.Time{}}
}

// Concern reports whether a sync may have pods of the cache to record or to forget since the last call: files
// came, went or changed whose attachments had no ADD of the plugin.
func (c *CacheEvents) Concern() bool {
	files, err := podinfo.CacheFiles(c.node.CacheDir)
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	if err != nil {
		return true // the sync reports it
	}
	withoutADD := map[string]time.Time{}
	for file, written := range files {
		if c.withADD[file].Equal(written) {
			continue
		}
		isNew := !c.withoutADD[file].Equal(written) // an ADD comes before its file
		if isNew && c.node.hadADD(file) {
			c.withADD[file] = written
			continue
		}
		withoutADD[file] = written
	}
	for file := range c.withADD {
		if _, is := files[file]; !is {
			delete(c.withADD, file)
		}
	}
	changed := !maps.EqualFunc(c.withoutADD, withoutADD, time.Time.Equal)
	c.withoutADD = withoutADD
	return changed
}

// hadADD reports whether the attachment of a file in the cache had an ADD of the plugin. The file need not be
// readable.
func (n *Node) hadADD(file string) bool {
	for _, x := range podinfo.InFileName(file) {
		had, err := n.Dir.Attached(attachmentOf(x))
		if had && err == nil {
			return true
		}
	}
	return false
}

func attachmentOf(x podinfo.Cached) store.Attachment {
	return store.Attachment{Network: x.Network, ContainerID: x.ContainerID, IfName: x.IfName}
}

// syncCachedPods records the pods of networks with a plugin entry that have no record, and forgets those
// whose file or network namespace does not exist any more. A file that cannot be read, or a namespace, says
// nothing about its pod: what is recorded stays, and what is not is reported. A DEL of the plugin removes the
// record before the runtime removes the file. So that the pod is not recorded again, a file is decided about
// once, and again only if it was written again, or another network has an entry.
func (n *Node) syncCachedPods(src *Sources) cacheSync {
	c := n.cached
	c.unrecorded = nil
	files, err := n.readCache()
	if files == nil {
		return cacheSync{warnings: []error{err}}
	}
	foundRecords, err := c.begin(n.Dir, src, files)
	removedRecords, warnings := n.forgetCachedPods(files)
	wroteRecords := false
	for _, file := range slices.Sorted(maps.Keys(files)) {
		isDecided := c.decided[file].Equal(files[file])
		if isDecided {
			continue
		}
		recorded, unrecorded := n.syncCachedFile(file, files[file], src)
		if recorded {
			wroteRecords = true
		}
		if unrecorded != nil {
			c.unrecorded = append(c.unrecorded, *unrecorded)
		}
	}
	if foundRecords || wroteRecords {
		c.awaitRules = true
	}
	return cacheSync{
		changed:  foundRecords || removedRecords || wroteRecords,
		warnings: append([]error{err}, warnings...),
	}
}

// syncCachedFile decides about a file, and records its pod if it is to be recorded. Otherwise it returns the
// pod that has no record and should have one, which is tried again.
func (n *Node) syncCachedFile(file string, written time.Time, src *Sources) (bool, *UnrecordedPod) {
	c := n.cached
	decision := n.decide(file, written, src)
	if decision.again {
		return false, nil
	}
	recorded := false
	if decision.record {
		var err error
		recorded, err = n.recordCached(file, decision.pod, written)
		if err != nil {
			const reason = "its record cannot be written"
			decision.without = &UnrecordedPod{File: file, Reason: reason, Detail: err.Error()}
		}
	}
	if decision.without == nil {
		c.decided[file] = written
		return recorded, nil
	}
	if _, isRecorded := c.recorded[file]; isRecorded {
		return recorded, nil // the record stays
	}
	return recorded, decision.without
}

// forgetCachedPods removes the records of pods that have gone, and returns whether it removed some. One that
// cannot be removed is tried again at the next sync.
func (n *Node) forgetCachedPods(files map[string]time.Time) (forgot bool, warnings []error) {
	c := n.cached
	for _, file := range slices.Sorted(maps.Keys(c.recorded)) {
		if !n.hasGone(file, files) {
			continue
		}
		err := n.Dir.DetachCached(c.recorded[file])
		if err != nil {
			warnings = append(warnings, err)
			continue
		}
		delete(c.recorded, file)
		forgot = true
	}
	keepKeys(c.decided, files)
	keepKeys(c.read, files)
	return forgot, warnings
}

// keepKeys deletes what another map has no key for.
func keepKeys[V, W any](from map[string]V, keep map[string]W) {
	for key := range from {
		if _, isKept := keep[key]; !isKept {
			delete(from, key)
		}
	}
}

// readCache returns the files of the cache with their times, or nil if nothing is known about them.
func (n *Node) readCache() (map[string]time.Time, error) {
	if n.CacheDir == "" {
		return nil, nil
	}
	files, err := podinfo.CacheFiles(n.CacheDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return files, err
}

// hasGone reports whether a file does not exist any more, or its network namespace.
func (n *Node) hasGone(file string, files map[string]time.Time) bool {
	written, exists := files[file]
	if !exists {
		return true
	}
	var err error
	known, isKnown := n.cached.knownPod(file, written)
	if isKnown {
		err = podinfo.CheckNetNS(known.NetNS)
	} else {
		_, err = n.readCached(file, written)
	}
	return errors.Is(err, podinfo.ErrNoNetNS)
}

// readCached reads a file of the cache and remembers what it said. A file is not read again while its network
// namespace cannot be used: then the pod has no addresses and no configuration, and the error is the one of
// its network namespace now.
func (n *Node) readCached(file string, written time.Time) (podinfo.Cached, error) {
	known, isKnown := n.cached.knownPod(file, written)
	if isKnown {
		err := podinfo.CheckNetNS(known.NetNS)
		if err != nil {
			return known, err
		}
	}
	pod, err := podinfo.ReadCached(filepath.Join(n.CacheDir, file))
	n.cached.remember(file, written, pod)
	return pod, err
}

// knownPod returns the pod of a file as it was read last, unless the file was written again since.
func (c *cachedPods) knownPod(file string, written time.Time) (pod podinfo.Cached, isKnown bool) {
	last, wasRead := c.read[file]
	if !wasRead || !last.written.Equal(written) {
		return podinfo.Cached{}, false
	}
	return last.pod, true
}

// remember keeps what a file said, if that has the pod's network namespace.
func (c *cachedPods) remember(file string, written time.Time, pod podinfo.Cached) {
	if pod.NetNS == "" {
		return
	}
	if c.read == nil {
		c.read = map[string]cachedFile{}
	}
	pod.Addresses, pod.Config = nil, nil
	c.read[file] = cachedFile{written, pod}
}

// cacheDecision is what becomes of a file in the cache. The zero value is that its pod is none of ip-masq's.
type cacheDecision struct {
	record  bool
	pod     podinfo.Cached // to record
	without *UnrecordedPod // why the pod cannot be recorded
	again   bool           // its network namespace or file is missing, maybe only for a moment
}

// decide decides about a file in the cache, which was written at a time.
func (n *Node) decide(file string, written time.Time, src *Sources) cacheDecision {
	x, err := n.readCached(file, written)
	if errors.Is(err, podinfo.ErrNoNetNS) || errors.Is(err, fs.ErrNotExist) {
		return cacheDecision{again: true}
	}
	network := x.Network
	if network == "" {
		network = networkInName(file, src.ConfDir)
	}
	if network == "" {
		return cacheDecision{}
	}
	list := src.PluginFile.Conflist(src.ConfDir, network)
	if list == nil {
		return cacheDecision{}
	}
	without := unrecordable(file, x, err, list, src.PluginFile.Present)
	if without == nil {
		return cacheDecision{record: true, pod: x}
	}
	if n.hadADD(file) {
		return cacheDecision{}
	}
	return cacheDecision{without: without}
}

// unrecordable returns why the pod of a file cannot be recorded, or nil. With plugin.toml the runtime's
// configuration must be that of the conflist.
func unrecordable(
	file string, pod podinfo.Cached, readErr error, list *config.Conflist, hasPluginFile bool,
) *UnrecordedPod {
	unreadable, isUnreadable := errors.AsType[*podinfo.UnreadableError](readErr)
	if isUnreadable {
		detail := ""
		if unreadable.Err != nil {
			detail = unreadable.Err.Error()
		}
		return &UnrecordedPod{File: file, Reason: unreadable.Reason, Detail: detail}
	}
	if hasPluginFile && !pod.SameConfig(list.Doc, config.PluginType) {
		const reason = "the runtime's configuration is not that of the conflist, with or without the plugin entry"
		return &UnrecordedPod{File: file, Reason: reason}
	}
	return nil
}

// networkInName returns the network of a file in the cache that cannot be read, or "": of several that its
// name may mean, the longest one.
func networkInName(file string, dir config.ConfDir) (network string) {
	for _, x := range podinfo.InFileName(file) {
		isNetwork := func(list config.Conflist) bool { return list.Network == x.Network }
		if slices.ContainsFunc(dir.Conflists, isNetwork) {
			network = x.Network
		}
	}
	return network
}

// UnrecordedPods returns the pods of the cache that have no record, for a command on a node without a
// reconciler. It writes nothing.
func (n *Node) UnrecordedPods(r *Report) (all []UnrecordedPod) {
	if !r.mayRecord() {
		return nil
	}
	files, err := n.readCache()
	r.warn(err)
	for _, file := range slices.Sorted(maps.Keys(files)) {
		decision := n.decide(file, files[file], r.Sources)
		if decision.record {
			decision.without = &UnrecordedPod{File: file, Reason: "no reconciler has recorded it"}
		}
		if decision.without != nil && !n.hasRecord(file) {
			all = append(all, *decision.without)
		}
	}
	return all
}

// hasRecord reports whether the attachment of a file in the cache has a record. The file need not be
// readable.
func (n *Node) hasRecord(file string) bool {
	for _, x := range podinfo.InFileName(file) {
		p, err := n.Dir.Pod(attachmentOf(x))
		if p != nil && err == nil {
			return true
		}
	}
	return false
}

// DescribeUnrecorded returns a line for each cause.
func DescribeUnrecorded(pods []UnrecordedPod) (lines []string) {
	first, count := map[string]UnrecordedPod{}, map[string]int{}
	for _, p := range pods {
		if count[p.Reason] == 0 {
			first[p.Reason] = p
		}
		count[p.Reason]++
	}
	for _, reason := range slices.Sorted(maps.Keys(count)) {
		p := first[reason]
		pods := "pods"
		if count[reason] == 1 {
			pods = "pod"
		}
		line := fmt.Sprintf("%d %s of the runtime's cache: %s (such as %s",
			count[reason], pods, reason, policy.Printable(p.File))
		if p.Detail != "" {
			line += ": " + policy.Printable(p.Detail)
		}
		lines = append(lines, line+")")
	}
	return lines
}

// begin makes the state that of the records on disk, and lets the files of all networks count again if others
// have an entry. It reports whether it found records that were not known. With an error there may be other
// records, which the next sync reads.
func (c *cachedPods) begin(dir *store.Dir, src *Sources, files map[string]time.Time) (found bool, err error) {
	if !c.hasAllRecords {
		found, err = c.readRecords(dir, files)
		c.hasAllRecords = err == nil
	}
	var conflists []string
	for _, list := range src.ConfDir.Conflists {
		if len(list.Entries) > 0 {
			conflists = append(conflists, list.Network, string(list.Doc))
		}
	}
	if slices.Equal(conflists, c.conflists) {
		return found, err
	}
	c.conflists = conflists
	for file := range c.decided {
		if _, isRecorded := c.recorded[file]; !isRecorded {
			delete(c.decided, file)
		}
	}
	return found, err
}

// readRecords adds the records on disk to those that are known, and reports whether there were others.
func (c *cachedPods) readRecords(dir *store.Dir, files map[string]time.Time) (found bool, err error) {
	if c.recorded == nil {
		c.recorded, c.decided = map[string]store.Attachment{}, map[string]time.Time{}
	}
	pods, _, err := dir.Pods()
	for _, p := range pods {
		if !p.Cached {
			continue
		}
		x := podinfo.Cached{Network: p.Network, ContainerID: p.ContainerID, IfName: p.IfName}
		file := x.File()
		if _, isKnown := c.recorded[file]; !isKnown {
			c.recorded[file] = p.Attachment
			c.decided[file] = files[file]
			found = true
		}
	}
	return found, err
}

// recordCached records a pod. One that is recorded is replaced, as the runtime has written its file again.
// Its record is as old as its file, which orders pods of the cache that have one address; an ADD's record
// wins against all of them.
func (n *Node) recordCached(file string, x podinfo.Cached, written time.Time) (recorded bool, err error) {
	a := attachmentOf(x)
	recorded, err = n.Dir.AttachCached(store.Pod{
		Attachment: a, At: written.Sub(booted()).Nanoseconds(),
		Namespace: x.Namespace, Name: x.Name, Addresses: x.Addresses,
	})
	if recorded {
		n.cached.recorded[file] = a
	}
	return recorded, err
}
