"""From labelled images to a classifier that works, and from it to the classes of other images. See docs/classifier.md.

finetune, settings        the verb's function, checked before torch is imported; its settings
making, heads, held_out   the classifier: fitted on frozen features, or trained as a whole
scores, page              its accuracy on test images, and the page about it
model, storage, place     the module, its file, and where that is
predict, images           the verb's function; what images it takes
journal, tables           predictions that survive a kill, and the files that they become
"""
